"""Packages that are wrong in every way: none stops a command, hides another, or reaches beyond."""

from __future__ import annotations

import json
import re

import pytest

SHOUT = "\x1b[31;5m\x07\u202egnp\u2028\n"
SHOWN = re.escape(r"\x1b[31;5m\x07\u202egnp\u2028\n")
EXTENSION = """
from specplug import hookimpl


class Extension:
    @hookimpl
    def on_step(self, runtime, report):
        pass

    @hookimpl
    def register_commands(self, cli):
        @cli.command()
        def NAME():
            pass


algorithm = Extension()
"""


def before(code):
    """What stands above a sound plugin."""
    return [("from specplug", f"{code}\nfrom specplug")]


def describing(code):
    return [("return AlgorithmInfo(", f"{code}\n        return AlgorithmInfo(")]


OWN = "class Own({}):\n    pass\nraise Own('own')"
UNSPEAKABLE = "class Own(Exception):\n    def __str__(self):\n        raise Own\nraise Own"

WRONG = {
    "EXIT_0": (before("import sys\nsys.exit(0)"), "import failed: SystemExit: 0"),
    "EXIT": (before("raise SystemExit"), "import failed: SystemExit"),
    "OWN_BASE": (before(OWN.format("BaseException")), "import failed: Own: own"),
    "OWN_INTERRUPT": (before(OWN.format("KeyboardInterrupt")), "import failed: Own: own"),
    "GENERATOR_EXIT": (before("raise GeneratorExit"), "import failed: GeneratorExit"),
    "GROUP": (
        before("raise BaseExceptionGroup('many', [SystemExit(1)])"),
        "import failed: BaseExceptionGroup: many (1 sub-exception)",
    ),
    "UNSPEAKABLE": (before(UNSPEAKABLE), "import failed: Own"),
    "RECURSION": (before("def f(): f()\nf()"), "import failed: RecursionError: maximum "),
    "SYNTAX": (before("def"), "import failed: SyntaxError: invalid syntax (__init__.py, line "),
    "NUL": ([("from specplug", "\0\nfrom specplug")], "import failed: SyntaxError: source code "),
    "DESCRIBE_EXITS": (describing("raise SystemExit(0)"), "describe() raised SystemExit: 0"),
    "DESCRIBE_BASE": (
        describing("class Own(BaseException): pass\n        raise Own"),
        "describe() raised Own",
    ),
    "DESCRIBE_NONE": (describing("return None"), "describe() returned NoneType None"),
    "DESCRIBE_UNSPEAKABLE": (
        describing(
            "class Own:\n            def __repr__(self): raise SystemExit\n        return Own()"
        ),
        "looking at it raised SystemExit",
    ),
    "SUMMARY": (
        [('"Own words of NAME"', "5")],
        "describe() raised TypeError: 'summary' must be <class 'str'> (got 5 that is a ",
    ),
    "PAPER": (
        [("api_version=1", "api_version=1, paper=b'x'")],
        "describe() raised TypeError: 'paper' must be <class 'str'>",
    ),
    "WEIGHTS": (
        [("api_version=1", "api_version=1, weights={1: 2}")],
        "describe() raised TypeError: 'weights' must be <class 'str'>",
    ),
    "CAPABLE": (
        [("api_version=1", "api_version=1, capabilities={}")],
        "describe() raised TypeError: 'capabilities' must be <class 'specplug.algorithm.Cap",
    ),
    "API": ([("api_version=1", "api_version='new'")], "it was built for API version 'new'"),
    "LOUD_ERROR": (before(f"raise ValueError({SHOUT!r})"), "import failed: ValueError: "),
    "ATTRIBUTE": (
        [("algorithm = Algorithm()", "def __getattr__(name): raise SystemExit(name)")],
        "looking at it raised SystemExit: ",
    ),
    "NOT_DIR": (
        [("algorithm = Algorithm()", "class A:\n    def __dir__(self): raise BaseException\n"
          "algorithm = A()")],
        "looking at it raised BaseException",
    ),
    "MODULE": ([], "import failed: ModuleNotFoundError: No module named 'specplug_gone'"),
    "SELF": ([("algorithm = Algorithm()", "import sys\nalgorithm = sys")], "the module lacks the"),
    "DELETED": (
        before("import sys\nsys.modules[__name__] = None"),
        "specplug_deleted has no attribute 'algorithm'",
    ),
}  # fmt: skip


@pytest.fixture
def wrong(plugin_folder):
    """A folder of all of them, and a sound one."""
    for name, (replacements, _) in WRONG.items():
        value = "specplug_gone:algorithm" if name == "MODULE" else ""
        plugin_folder.write(name, *replacements, value=value)
    code = EXTENSION.replace("@cli.command()", "raise SystemExit(0)")
    plugin_folder.write("quits", code=code, group="specplug.extensions")
    code = EXTENSION.replace("from specplug", OWN.format("BaseException") + "\nfrom specplug", 1)
    plugin_folder.write("raises", code=code, group="specplug.extensions")
    plugin_folder.write("ZZ_SOUND")
    return plugin_folder


def test_every_wrong_package_is_told_and_stops_nobody(wrong):
    for arguments in (["list"], ["list", "--check"], ["--help"]):
        done = wrong.specplug(*arguments)
        assert done.returncode == 0
        assert "Traceback" not in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr
    assert "ZZ_SOUND" in wrong.specplug("list").stdout
    done = wrong.specplug("doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    found = {entry["name"]: entry for entry in report["algorithms"]}
    for name, (_, what) in WRONG.items():
        assert found[name]["status"].startswith(f"broken: {what}"), found[name]["status"]
        (problem,) = found[name]["problems"]
        module = f"specplug_{'gone' if name == 'MODULE' else name.lower()}"
        subject = f"algorithm {name} (specplug-{name.lower()} 1.0, {module}:algorithm): "
        assert problem["message"].startswith(subject + what)
    assert found["ZZ_SOUND"]["status"] == "ok"
    assert [e["status"] for e in report["extensions"] if e["name"] != "VIEWS"] == [
        "broken: register_commands raised SystemExit: 0",
        "broken: import failed: Own: own",
    ]


def test_choosing_a_wrong_package_is_an_error_in_one_line(wrong):
    for name in ("EXIT_0", "OWN_INTERRUPT", "DESCRIBE_BASE", "LOUD_ERROR"):
        done = wrong.specplug("info", name)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: algorithm {name} (specplug-{name.lower()} 1.0, ")
        assert done.stderr.count("\n") == 1
        assert done.stderr[:-1].isprintable()


def test_list_shows_what_the_source_shows(plugin_folder):
    plugin_folder.write("MISSING", value="specplug_gone:algorithm")
    plugin_folder.write("SYNTAX", *before("def"))
    plugin_folder.write("COMPUTED", ('"Own words of NAME"', 'str("computed")'))
    words = "summary=\"It's (own) # \" 'words'"
    plugin_folder.write("JOINED", ('summary="Own words of NAME"', words))
    done = plugin_folder.specplug("list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert listed["MISSING"]["status"] == (
        "broken: import failed: ModuleNotFoundError: No module named 'specplug_gone'"
    )
    assert listed["SYNTAX"]["status"].startswith("broken: import failed: SyntaxError: ")
    assert listed["COMPUTED"]["summary"] == "Distribution of specplug-computed"
    assert listed["JOINED"]["summary"] == "It's (own) # words"
    done = plugin_folder.specplug("list", "--check", "--json")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert listed["COMPUTED"]["summary"] == "computed"
    assert listed["JOINED"]["summary"] == "It's (own) # words"


def test_control_characters_never_reach_the_terminal(plugin_folder):
    metadata = f"Name: {{}}\nVersion: 1.0{SHOUT.strip()}\nSummary: x{SHOUT}"
    plugin_folder.write("ALOUD", ("Own words of NAME", repr(SHOUT)[1:-1]), metadata=metadata)
    plugin_folder.write("BLOUD", *before(f"raise ValueError({SHOUT!r})"), metadata=metadata)
    for arguments in (["list"], ["list", "--check"], ["info", "ALOUD"], ["doctor"]):
        done = plugin_folder.specplug(*arguments)
        said = (done.stdout + done.stderr).replace("\n", "")
        assert said.isprintable()
        assert r"\x1b[31;5m" in said
    assert re.search(f"ALOUD .*{SHOWN}\n", plugin_folder.specplug("list").stdout)
    done = plugin_folder.specplug("info", f"no{SHOUT}")
    assert (done.returncode, done.stderr[:-1].isprintable()) == (2, True)
    listed = json.loads(plugin_folder.specplug("list", "--json").stdout)["algorithms"]
    assert SHOUT in [entry["summary"] for entry in listed]


def test_nobody_claims_the_cores_own_name(plugin_folder):
    plugin_folder.write("NONE", *before("raise AssertionError"), distribution="specplug-evil")
    done = plugin_folder.specplug("list", "--check", "--json")
    statuses = [
        (entry["distribution"], entry["status"])
        for entry in json.loads(done.stdout)["algorithms"]
        if entry["name"] == "NONE"
    ]
    assert ("specplug", "ok") in statuses
    assert ("specplug-evil", "broken: NONE is the core's own algorithm (and 1 more)") in statuses
    assert plugin_folder.specplug("info", "NONE").returncode == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "# für alle\n[specplug.algorithms]\nLOST = specplug_lost:algorithm\n".encode("latin-1"),
            "broken: its entry_points.txt is not UTF-8 (byte 3)",
        ),
        (
            "[specplug.algorithms]\nLOST = specplug_lost:algorithm\n".encode("utf-16"),
            None,
        ),
        (
            b"LOST = specplug_lost:algorithm\n",
            "broken: the entry point LOST stands in no section",
        ),
        (
            "\ufeff[specplug.algorithms]\nLOST = specplug_lost:algorithm\n".encode(),
            "broken: the entry point LOST stands in no section",
        ),
        (
            b"[specplug.algorithm]\nLOST = specplug_lost:algorithm\n",
            "broken: the entry point LOST stands in section [specplug.algorithm], which nothing",
        ),
    ],
    ids=["latin-1", "utf-16", "no section", "byte order mark", "misspelt section"],
)
def test_lost_entry_points_are_told(text, status, plugin_folder):
    plugin_folder.write("LOST")
    plugin_folder.write("ZZ_SOUND")
    file = plugin_folder.path / "specplug_lost-1.0.dist-info" / "entry_points.txt"
    file.write_bytes(text)
    for arguments in (["list", "--check", "--json"], ["doctor", "--json"]):
        done = plugin_folder.specplug(*arguments)
        assert done.stderr == ""
        listed = json.loads(done.stdout)["algorithms"]
        of_it = [entry for entry in listed if entry["distribution"] == "specplug-lost"]
        assert any(entry["status"].startswith(status or "broken: ") for entry in of_it)
        assert all(entry["problems"] for entry in of_it)
        assert "ZZ_SOUND" in [entry["name"] for entry in listed]


def test_doctor_tells_files_heavy_imports_and_commands(plugin_folder):
    file = plugin_folder.write("HEAVY", *before("if True:\n    import torch.nn"))
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    plugin_folder.write("LIGHT", *before(source))
    plugin_folder.write("hello", code=EXTENSION, group="specplug.extensions")
    plugin_folder.write("list", code=EXTENSION, group="specplug.extensions")
    report = json.loads(plugin_folder.specplug("doctor", "--json").stdout)
    found = {entry["name"]: entry for entry in report["algorithms"]}
    assert found["HEAVY"]["file"] == str(file)
    assert found["HEAVY"]["heavy_imports"] == ["torch"]
    assert found["LIGHT"]["heavy_imports"] == []
    added = {entry["name"]: entry["commands"] for entry in report["extensions"]}
    assert (added["hello"], added["list"]) == (["hello"], ["list"])
    slow, taken = report["notes"]
    assert slow.startswith("algorithm HEAVY (specplug-heavy 1.0, specplug_heavy:algorithm) imports")
    assert "brings the command list, which is the core's own" in taken
    shown = plugin_folder.specplug("doctor").stdout
    assert str(file) in shown
    assert "commands of hello: hello\n" in shown


def test_disabled_extension_does_not_run(plugin_folder, monkeypatch):
    from click.testing import CliRunner

    from specplug import LLM, UsageError
    from specplug.cli import main
    from specplug.registry import Registry

    marker = plugin_folder.path / "ran"
    code = EXTENSION.replace("from specplug", f"open({str(marker)!r}, 'w')\nfrom specplug")
    plugin_folder.write("tracer", code=code, group="specplug.extensions")
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    run = ["generate", "--max-new-tokens", "1", "x", "--disable-extension"]
    done = CliRunner().invoke(main, [*run, "TRACER"])
    assert (done.exit_code, marker.exists()) == (0, False), done.stderr
    message = "unknown extension 'tracr': did you mean tracer? installed are "
    for command in (run, ["bench", "--disable-extension"], ["serve", "--disable-extension"]):
        done = CliRunner().invoke(main, [*command, "tracr"])
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {message}")
        assert "tracer" in done.stderr.removeprefix(f"error: {message}")
    with pytest.raises(UsageError, match="unknown extension 'tracr'"):
        LLM(disable_extensions=["tracr"])
    with pytest.raises(UsageError, match="disable_extensions='tracer': expected a list"):
        LLM(disable_extensions="tracer")
    with LLM(disable_extensions=(name for name in ["tracer"])):  # which can be read once
        assert not marker.exists()
    left = Registry().extensions(name for name in ["tracer"])
    assert "tracer" not in [extension.name for extension in left]
    with LLM():
        assert marker.exists()


VALIDATE = """    @hookimpl
    def validate_config(self, config):
        raise SystemExit(0)


algorithm ="""


@pytest.mark.parametrize(
    "change",
    [("return self", "raise SystemExit(0)"), ("algorithm =", VALIDATE)],
    ids=["create_worker", "validate_config"],
)
def test_plugin_that_exits_within_a_command_is_a_failure(change, plugin_folder, monkeypatch):
    from click.testing import CliRunner

    from specplug.cli import main

    monkeypatch.setattr("specplug.debug.DEBUG", False)
    plugin_folder.write("QUITS", change)
    done = CliRunner().invoke(main, ["generate", "--speculative-algorithm", "QUITS", "x"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "SystemExit: 0" in done.stderr


def test_list_of_sources_that_cannot_be_compiled_says_why(plugin_folder):
    sound = plugin_folder.write("SOUND").read_text()
    deep = f"{sound}x = {'(' * 5000}1{')' * 5000}\n"
    wrong = {
        "NUL": (sound + "x = '\0'\n").encode(),
        "UTF16": sound.encode("utf-16"),
        "UTF16LE": sound.encode("utf-16-le"),
        "LATIN": sound.encode() + b"x = '\xff'\n",
        "CODING": b"# coding: nonsense\n" + sound.encode(),
        "PARENTHESES": deep.encode(),
        "SIGNS": f"{sound}x = {'-' * 50_000}1\n".encode(),
        "ELSEWHERE": b"from .elsewhere import algorithm\nx = (\n",
    }
    for name, source in wrong.items():
        plugin_folder.write(name).write_bytes(source)
    done = plugin_folder.specplug("list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert listed["SOUND"]["status"] == "installed"
    for name in wrong:
        assert listed[name]["status"].startswith("broken: import failed: "), listed[name]
    done = plugin_folder.specplug("list", "--check", "--json")
    checked = {entry["name"]: entry["status"] for entry in json.loads(done.stdout)["algorithms"]}
    assert {name: listed[name]["status"] for name in wrong} == {n: checked[n] for n in wrong}
