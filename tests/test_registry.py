"""Finding, checking and choosing plugins: every way one can be wrong, with real broken packages."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings

import pytest
from importlib_metadata import EntryPoint

from specplug import (
    LLM,
    AlgorithmInfo,
    PluginError,
    SamplingParams,
    UnknownAlgorithm,
    contract,
    entries,
    hookimpl,
    hookspecs,
)
from specplug.contract import HOOKS, implemented_hooks
from specplug.registry import PluginWarning, Registry, build_plugin_manager
from specplug.speculative import plain

BROKEN = "algorithm BROKEN (specplug-broken 1.0, specplug_broken:algorithm): "


def status(name: str) -> str:
    (entry,) = (entry for entry in Registry().entries() if entry.name == name)
    return entry.status


def check(name: str = "BROKEN") -> str:
    """The one problem of an algorithm, which is also what choosing it says."""
    registry = Registry()
    (problem,) = registry.check(name)
    with pytest.raises(PluginError) as caught:
        registry.select(name)
    assert str(caught.value) == str(problem)
    assert "\n" not in str(problem)
    return str(problem)


WRONG = {
    "import_failure": (
        [("from specplug", "raise RuntimeError('no driver')\nfrom specplug")],
        "import failed: RuntimeError: no driver; expected module specplug_broken to import; "
        "specplug doctor shows the traceback; fix the plugin or tell its author",
    ),
    "exit_on_import": (
        [("from specplug", "raise SystemExit(3)\nfrom specplug")],
        "import failed: SystemExit: 3; expected module specplug_broken to import; "
        "specplug doctor shows the traceback; fix the plugin or tell its author",
    ),
    "dependency_missing": (
        [("from specplug", "import not_there.at_all\nfrom specplug")],
        "import failed: ModuleNotFoundError: No module named 'not_there'; expected module "
        "specplug_broken to import; install what it needs: not_there",
    ),
    "attribute_missing": (
        [("algorithm = Algorithm()", "algoritm = Algorithm()")],
        "specplug_broken has no attribute 'algorithm'; expected the plugin object 'algorithm'; "
        "name 'algoritm' instead in the pyproject.toml of specplug-broken and install that again",
    ),
    "hook_missing": (
        [("    @hookimpl\n    def propose(", "    def something_else(")],
        "the Algorithm object lacks the required hook propose; expected describe, create_worker, "
        "build_draft_input, propose, each marked @specplug.hookimpl; write what is missing "
        "(specplug/hookspecs.py says how)",
    ),
    "hook_missing_but_meant": (
        [("    @hookimpl\n    def propose(", "    def propse(")],
        "the Algorithm object lacks the required hook propose; expected describe, create_worker, "
        "build_draft_input, propose, each marked @specplug.hookimpl; rename propse() to propose() "
        "(specplug/hookspecs.py says how)",
    ),
    "nothing_there": (
        [("algorithm = Algorithm()", "algorithm = None")],
        "the NoneType object lacks the required hooks describe, create_worker, build_draft_input, "
        "propose; expected describe, create_worker, build_draft_input, propose, each marked "
        "@specplug.hookimpl; write what is missing (specplug/hookspecs.py says how)",
    ),
    "hook_misspelt": (
        [("def propose(", "def propse(")],
        "propse() is marked @hookimpl, but there is no such hook; expected propose(); "
        "rename it to propose",
    ),
    "hookimpl_on_a_helper": (
        [("algorithm =", "    @hookimpl\n    def zzz(self):\n        pass\n\n\nalgorithm =")],
        "zzz() is marked @hookimpl, but there is no such hook; "
        f"expected one of {', '.join(HOOKS)}; take a hook's name, or take the @hookimpl away",
    ),
    "hookimpl_forgotten": (
        [("    @hookimpl\n    def propose(", "    def propose(")],
        "propose() has a hook's name but no @hookimpl, so it would never be called; "
        "expected @specplug.hookimpl above it; add it, or rename the method if it is not meant as "
        "the hook",
    ),
    "hookimpl_forgotten_on_an_optional_hook": (
        [("algorithm =", "    def verify(self, draft):\n        pass\n\n\nalgorithm =")],
        "verify() has a hook's name but no @hookimpl, so it would never be called; "
        "expected @specplug.hookimpl above it; add it, or rename the method if it is not meant as "
        "the hook",
    ),
    "argument_unknown": (
        [("runtime, batch, draft_input)", "runtime, batch, draft_inputs)")],
        "propose() takes 'draft_inputs', which the hook does not have; "
        "expected propose(runtime, batch, draft_input) or fewer of these; "
        "rename it to 'draft_input'",
    ),
    "argument_unlike_any": (
        [("runtime, batch, draft_input)", "runtime, batch, scheduler)")],
        "propose() takes 'scheduler', which the hook does not have; "
        "expected propose(runtime, batch, draft_input) or fewer of these; take it away",
    ),
    "argument_never_passed": (
        [("runtime, batch, draft_input)", "runtime, batch, draft_input=None)")],
        "propose()'s argument 'draft_input' has a default, so it would never be passed; expected "
        "propose(runtime, batch, draft_input) or fewer of these; "
        "make 'draft_input' a plain argument",
    ),
    "argument_keyword_only": (
        [("runtime, batch, draft_input)", "runtime, *, batch)")],
        "propose()'s argument 'batch' is keyword-only, so it would never be passed; expected "
        "propose(runtime, batch, draft_input) or fewer of these; make 'batch' a plain argument",
    ),
    "class_for_an_object": (
        [("algorithm = Algorithm()", "algorithm = Algorithm")],
        "it is the class Algorithm; expected an object; "
        "make it an instance, Algorithm(); an entry point names one as well "
        "(algorithm = Algorithm())",
    ),
    "built_for_a_newer_api": (
        # With hooks of its own, which are no fault then.
        [("api_version=1", "api_version=2"), ("def propose(", "def propose_many(")],
        "it was built for API version 2; expected API version 1, which this specplug has; "
        "upgrade specplug (pip install --upgrade …)",
    ),
    "built_for_an_older_api": (
        [("api_version=1", "api_version=0")],
        "it was built for API version 0; expected API version 1, which this specplug has; "
        "upgrade the plugin (pip install --upgrade …)",
    ),
    "describe_raises": (
        [("return AlgorithmInfo(", "raise KeyError('tiny')\n        return AlgorithmInfo(")],
        "describe() raised KeyError: 'tiny'; expected a specplug.AlgorithmInfo; "
        "fix describe(); specplug doctor shows the traceback of an installed plugin",
    ),
    "describe_exits": (
        [("return AlgorithmInfo(", "raise SystemExit\n        return AlgorithmInfo(")],
        "describe() raised SystemExit; expected a specplug.AlgorithmInfo; "
        "fix describe(); specplug doctor shows the traceback of an installed plugin",
    ),
    "describe_returns_something_else": (
        [("return AlgorithmInfo(", "return dict(")],
        "describe() returned dict {'name': 'BROKEN', 'summary': 'Own words of BROKEN', 'api…; "
        "expected a specplug.AlgorithmInfo; "
        "return specplug.AlgorithmInfo(name=…, summary=…, api_version=…)",
    ),
    "describe_gives_another_name": (
        [('name="NAME"', 'name="OTHER"')],
        "describe() gives the name 'OTHER'; expected 'BROKEN', the entry point's name; "
        "make the two equal in the plugin's describe() and pyproject.toml",
    ),
    "wrapper_that_does_not_yield": (
        [("    @hookimpl\n    def propose(", "    @hookimpl(wrapper=True)\n    def propose(")],
        "pluggy refuses it: Declared as wrapper=True or hookwrapper=True but function is not a "
        "generator function; expected hooks that it accepts; fix it",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_way_to_be_wrong_is_told(case, plugin_folder):
    replacements, message = WRONG[case]
    plugin_folder.write("BROKEN", *replacements)
    plugin_folder.write("SOUND")
    assert status("BROKEN") == "installed"  # only importing it can tell
    assert check() == BROKEN + message
    assert Registry().select("SOUND").info.name == "SOUND"


OLD = """
import specplug

class Old:
    @specplug.hookimpl
    def describe(self):
        return specplug.AlgorithmInfo(name="OLD", summary="Repeats the root", api_version=2)

    @specplug.hookimpl
    def create_worker(self):
        return self

    @specplug.hookimpl
    def build_draft_input(self, target_output):
        return specplug.DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(self, draft_input):
        return specplug.Draft.chain(draft_input.bonus_tokens.unsqueeze(1).expand(-1, 2).clone())

algorithm = Old()
"""
"""Its hooks take what its version had: fewer arguments than they have now, say."""


@pytest.fixture
def newer_core(monkeypatch):
    """This core as it will be two API versions later, when it takes the two last ones."""
    for module in (contract, plain):
        monkeypatch.setattr(module, "API_VERSION", 3)
    monkeypatch.setattr(contract, "OLDEST_API_VERSION", 2)


def test_plugin_of_an_older_api_runs_with_a_warning(plugin_folder, newer_core, tiny_model):
    plugin_folder.write("OLD", code=OLD)
    told = (
        "^algorithm OLD .* was built for API version 2, which a later specplug will not take; "
        "expected 3; upgrade the plugin"
    )
    with pytest.warns(PluginWarning, match=told):
        llm = LLM(tiny_model, speculative_algorithm="OLD")
    with llm:
        found = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=5))[0].token_ids
        assert llm.stats()["drafted"] > 0
    with LLM(tiny_model, speculative_algorithm="NONE") as llm:
        assert llm.generate([[3, 4, 5]], SamplingParams(max_tokens=5))[0].token_ids == found


@pytest.mark.parametrize(("version", "fix"), [(1, "upgrade the plugin"), (4, "upgrade specplug")])
def test_plugin_outside_the_range_of_apis_is_refused(plugin_folder, newer_core, version, fix):
    plugin_folder.write("BROKEN", ("api_version=1", f"api_version={version}"))
    assert check() == (
        f"{BROKEN}it was built for API version {version}; expected API version 2 to 3, which this "
        f"specplug takes; {fix} (pip install --upgrade …)"
    )


def test_hook_that_is_on_its_way_out_is_told(plugin_folder, monkeypatch):
    """As CONTRIBUTING.md says how: pluggy warns of whoever implements it."""
    told = PluginWarning("propose() is called draft() from API version 2 on")
    monkeypatch.setitem(hookspecs.propose.specplug_spec, "warn_on_impl", told)
    plugin_folder.write("OLD")
    with pytest.warns(PluginWarning, match="is called draft"):
        build_plugin_manager(Registry().select("OLD"))


def test_several_problems_are_all_told(plugin_folder):
    plugin_folder.write(
        "TWO", ("def propose(", "def propse("), ("(self, runtime)", "(self, model)")
    )
    assert [problem.what for problem in Registry().check("TWO")] == [
        "propse() is marked @hookimpl, but there is no such hook",
        "create_worker() takes 'model', which the hook does not have",
    ]
    with pytest.raises(PluginError, match=r"\(and 1 more: specplug doctor\)$"):
        Registry().select("TWO")


def test_declaration_that_attrs_refuses(plugin_folder):
    plugin_folder.write("BROKEN", ('name="NAME"', 'name="lower"'))
    assert check().startswith(f"{BROKEN}describe() raised ValueError: 'name' must match regex")


def test_module_missing(plugin_folder):
    plugin_folder.write("BROKEN", value="specplug_gone.plugin:algorithm")
    assert check() == (
        "algorithm BROKEN (specplug-broken 1.0, specplug_gone.plugin:algorithm): import failed: "
        "ModuleNotFoundError: No module named 'specplug_gone'; expected module "
        "specplug_gone.plugin to import; "
        "install it again (pip install --force-reinstall specplug-broken)"
    )


def test_two_distributions_with_one_name(plugin_folder):
    one = plugin_folder.write("BROKEN", ("from", "raise AssertionError('imported')\nfrom"))
    plugin_folder.write("BROKEN", distribution="specplug-rival")
    plugin_folder.write("SOUND")
    whys = [entry.status for entry in Registry().entries() if entry.name == "BROKEN"]
    why = "2 distributions bring BROKEN: specplug-broken 1.0 and specplug-rival 1.0"
    assert whys == [f"broken: {why}"] * 2
    assert Registry().names().count("BROKEN") == 1
    with pytest.raises(PluginError) as caught:
        Registry().select("BROKEN")
    assert str(caught.value) == (
        f"{BROKEN}{why}; expected one; pip uninstall specplug-broken or specplug-rival"
    )
    assert one.parent.name not in sys.modules
    assert Registry().select("sound").name == "SOUND"
    plugin_folder.remove("specplug-broken")
    assert Registry().select("BROKEN").entry.distribution == "specplug-rival"


@pytest.mark.parametrize("value", ["specplug broken", "specplug_broken:", ":algorithm", "a..b:c"])
def test_malformed_value_shows_in_the_plain_listing(value, plugin_folder):
    plugin_folder.write("BROKEN", value=value)
    plugin_folder.write("SOUND")
    assert status("BROKEN") == f"broken: malformed entry point BROKEN = {value!r}"
    assert check() == (
        f"algorithm BROKEN (specplug-broken 1.0, {value}): malformed entry point "
        f"BROKEN = {value!r}; expected 'module:attribute'; "
        "correct it in the pyproject.toml of specplug-broken and install that again"
    )
    assert Registry().check("SOUND") == []


def test_entry_points_file_with_a_line_that_is_none(plugin_folder):
    plugin_folder.write("BROKEN", entry_points="# ours\n[specplug.algorithms]\nBROKEN\n")
    plugin_folder.write("SOUND")
    assert status("BROKEN") == "broken: malformed entry point BROKEN = ''"
    assert Registry().select("SOUND").name == "SOUND"
    assert {"SOUND", "NONE"} <= set(Registry().names())


def test_name_that_users_cannot_type(plugin_folder):
    plugin_folder.write("twin")
    assert status("twin") == "broken: the entry point's name 'twin' is no algorithm's name"
    plugin_folder.write("TWIN", distribution="specplug-upper")
    assert Registry().select("twin").entry.distribution == "specplug-upper"


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        (None, ("specplug_sound-1.0.dist-info", "?", "")),
        ("", ("specplug_sound-1.0.dist-info", "?", "")),
        ("Name: specplug-sound\n", ("specplug-sound", "?", "")),
        ("Name: specplug-sound\n\nVersion: readme\n", ("specplug-sound", "?", "")),
        ("Version: 3\nName: x\nSummary: a: b\n\nName: y\n", ("x", "3", "a: b")),
    ],
)
def test_metadata_that_lacks_fields(metadata, shown, plugin_folder):
    plugin_folder.write("SOUND", metadata=metadata)
    (entry,) = (entry for entry in Registry().entries() if entry.name == "SOUND")
    assert (entry.distribution, entry.version, entry.summary) == shown
    assert Registry().check("SOUND") == []


def test_metadata_in_another_encoding(plugin_folder):
    plugin_folder.write("SOUND")
    file = plugin_folder.path / "specplug_sound-1.0.dist-info" / "METADATA"
    file.write_bytes("Name: specplug-sound\nSummary: für alle\n".encode("latin-1"))
    assert status("SOUND") == "installed"


def test_listing_imports_no_plugin_and_choosing_imports_one(plugin_folder):
    for name in ("ONE", "TWO"):
        plugin_folder.write(name)
    registry = Registry()
    assert {"ONE", "TWO"} <= set(registry.names())
    assert not {"specplug_one", "specplug_two"} & set(sys.modules)
    selected = registry.select("ONE")
    assert (selected.name, selected.info.summary) == ("ONE", "Own words of ONE")
    assert selected.entry.status == "ok"
    assert "specplug_one" in sys.modules
    assert "specplug_two" not in sys.modules


def test_entry_points_are_read_again_after_an_install(plugin_folder, monkeypatch):
    readings = []
    read = entries._read_entry_points
    monkeypatch.setattr(entries, "_read_entry_points", lambda: readings.append(1) or read())
    Registry()
    before = len(readings)
    assert "LATE" not in Registry().names()
    assert len(readings) == before, "nothing was installed"
    plugin_folder.write("LATE")
    assert "LATE" in Registry().names()
    plugin_folder.remove("specplug-late")
    assert "LATE" not in Registry().names()
    assert len(readings) == before + 2


def test_modules_of_the_core_import_no_torch():
    heavy = "torch", "transformers", "triton", "rich"
    code = (
        "import sys, specplug.registry, specplug.hookspecs, specplug.algorithm\n"
        f"specplug.registry.Registry().select('NONE')\nassert not {{*{heavy}}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_algorithm_names_the_nearest_and_all(plugin_folder):
    plugin_folder.write("LOOKAHEAD")
    with pytest.raises(UnknownAlgorithm) as caught:
        Registry().select("lokahead")
    assert str(caught.value).startswith("unknown algorithm 'lokahead': did you mean LOOKAHEAD? ")
    assert {"LOOKAHEAD", "NONE"} <= set(str(caught.value).split("installed are ")[1].split(", "))
    with pytest.raises(UnknownAlgorithm, match=r"^unknown algorithm 'x': installed are "):
        Registry().check("x")
    with pytest.raises(UnknownAlgorithm, match="none is installed"):
        Registry([]).select("x")


@pytest.mark.parametrize("blocked", ["ONE", " one ,TWO", "TWO,ONE,"])
def test_disabled(blocked, plugin_folder, monkeypatch):
    monkeypatch.setenv("SPECPLUG_DISABLE", blocked)
    plugin_folder.write("ONE")
    plugin_folder.write("THREE")
    assert status("ONE") == "disabled"
    assert status("THREE") == "installed"
    with pytest.raises(PluginError) as caught:
        Registry().select("ONE")
    assert str(caught.value) == (
        f"algorithm ONE (specplug-one 1.0, specplug_one:algorithm): it is disabled by "
        f"SPECPLUG_DISABLE={blocked}; expected it not to be named there; "
        "take ONE out of SPECPLUG_DISABLE"
    )
    assert "specplug_one" not in sys.modules


def test_entry_points_given_to_the_registry():
    point = EntryPoint("NONE", "specplug.speculative.plain:algorithm", "specplug.algorithms")
    other = EntryPoint("NONE", "nowhere", "console_scripts")
    registry = Registry([point, other])
    assert [entry.distribution for entry in registry.entries()] == ["unknown distribution"]
    assert registry.select("None").info.name == "NONE"


class Handmade:
    @hookimpl
    def describe(self):
        return AlgorithmInfo(name="HANDMADE", summary="From a notebook", api_version=1)

    @hookimpl
    def create_worker(self):
        return "worker"

    @hookimpl(specname="build_draft_input")
    def after_the_target(self, batch):
        return None

    @hookimpl
    def propose(self):
        return None


def test_plugin_object_instead_of_a_name():
    plugin = Handmade()
    selected = Registry([]).select(plugin)
    assert (selected.name, selected.plugin, selected.info.name) == ("HANDMADE", plugin, "HANDMADE")
    assert selected.entry.distribution == "a plugin object"
    assert Registry([]).select(selected) is selected
    with pytest.raises(PluginError, match=r"^algorithm Handmade \(a plugin object, .*: it is the"):
        Registry([]).select(Handmade)
    with pytest.raises(PluginError, match="the int object lacks the required hooks"):
        Registry([]).select(3)


def test_errors_of_a_plugin_object_say_what_it_is():
    with pytest.raises(
        PluginError, match=r"a plugin object, .*test_registry:Handmade\).* Handmade\(\)"
    ):
        Registry([]).select(Handmade)
    old = Handmade()
    old.describe = hookimpl(lambda: AlgorithmInfo(name="OLD", summary="Of 1999", api_version=99))
    with pytest.raises(PluginError, match=r"or declare api_version=\d+ in describe\(\)$"):
        Registry([]).select(old)


def test_error_of_a_plugin_object_tells_all_its_problems():
    class Broken:
        on_stop = hookimpl(lambda self: None)
        on_begin = hookimpl(lambda self: None)

    with pytest.raises(PluginError, match=r"^extension Broken .*on_begin.*; also: on_stop\(\) is"):
        Registry([]).extensions(objects=[Broken()])


@pytest.mark.parametrize("hookless", [None, "views", object()])
def test_extension_object_without_a_hook_is_refused(hookless):
    with pytest.raises(PluginError, match=r"\(a plugin object, .* object has no hook, so nothing"):
        Registry([]).extensions(objects=[hookless])


def test_modules_and_static_methods_can_be_plugins():
    module = types.ModuleType("a_plugin")
    for name in ("describe", "create_worker", "propose"):
        setattr(module, name, getattr(Handmade(), name))
    module.build_draft_input = Handmade().after_the_target
    assert Registry([]).select(module).name == "HANDMADE"
    static = {name: staticmethod(getattr(Handmade(), name)) for name in ("describe", "propose")}
    with pytest.raises(PluginError, match="lacks the required hooks create_worker, build_draft_in"):
        Registry([]).select(type("Static", (), static))


def test_properties_of_a_plugin_are_not_run():
    class Careful(Handmade):
        @property
        def weights(self):
            raise AssertionError("looked at")

    assert Registry([]).select(Careful()).name == "HANDMADE"


def test_implemented_hooks_are_in_hookspecs_order():
    assert implemented_hooks(Handmade()) == [
        "describe",
        "create_worker",
        "build_draft_input",
        "propose",
    ]
    assert next(iter(HOOKS)) == "describe"
    assert HOOKS["verify"] == ("runtime", "batch", "draft", "target_output")


class Defaults:
    @hookimpl(trylast=True)
    def create_worker(self):
        return "default worker"

    @hookimpl(trylast=True)
    def supports_target_verify_for_draft(self):
        return False


class Tracer:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def create_worker(self):
        result = yield
        self.seen.append(result)
        return result


def test_plugin_manager_of_a_run():
    tracer = Tracer()
    manager = build_plugin_manager(Registry([]).select(Handmade()), [tracer], Defaults())
    assert manager.project_name == "specplug"
    assert manager.hook.create_worker(runtime=None) == "worker"
    assert tracer.seen == ["worker"]
    assert manager.hook.supports_target_verify_for_draft() is False
    assert manager.hook.verify(runtime=None, batch=None, draft=None, target_output=None) is None


class Misspelt:
    @hookimpl
    def on_stop(self, report):
        raise AssertionError


def test_broken_extension_is_left_out_with_a_warning():
    tracer = Tracer()
    with pytest.warns(PluginWarning) as warned:
        manager = build_plugin_manager(
            Registry([]).select(Handmade()), [Misspelt(), tracer, tracer]
        )
    assert [str(warning.message) for warning in warned] == [
        "left out: extension Misspelt (a plugin object): on_stop() is marked @hookimpl, but there "
        "is no such hook; expected on_step(); rename it to on_step",
        "left out: extension Tracer (a plugin object): the same object takes part "
        "already; expected one object an extension; register it once",
    ]
    assert manager.hook.create_worker(runtime=None) == "worker"
    assert tracer.seen == ["worker"]


EXTENSION = """
from specplug import hookimpl


class Extension:
    @hookimpl
    def on_step(self, report):
        report.append("NAME")


algorithm = Extension()
"""


def test_installed_extensions(plugin_folder):
    group = "specplug.extensions"
    plugin_folder.write("first", code=EXTENSION, group=group)
    plugin_folder.write("second", code=EXTENSION, group=group)
    plugin_folder.write("third", ("on_step", "on_stp"), code=EXTENSION, group=group)
    plugin_folder.write("fourth", code="import nothing_there", group=group)
    plugin_folder.write("fifth", code=EXTENSION, group=group, value="no way")
    registry = Registry()
    entries = [entry for entry in registry.extension_entries() if entry.name != "VIEWS"]
    assert [entry.status for entry in entries] == [
        "broken: malformed entry point fifth = 'no way'",
        *["installed"] * 4,
    ]
    with pytest.warns(PluginWarning) as warned:
        extensions = registry.extensions()
    said = "".join(str(warning.message) for warning in warned)
    names = [extension.name for extension in extensions if extension.name != "VIEWS"]
    assert names == ["first", "second"]
    assert "extension third (specplug-third 1.0, specplug_third:algorithm): on_stp() is " in said
    assert "extension fourth (" in said
    assert "extension fifth (" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = build_plugin_manager(registry.select(Handmade()), extensions)
    report: list[str] = []
    manager.hook.on_step(runtime=None, report=report)
    assert sorted(report) == ["first", "second"]
