"""Another SGLang than the one that was tested is refused, in a line that says which was."""

from __future__ import annotations

import ast
import logging
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import running

import specplug_sglang
from specplug import UsageError
from specplug_sglang import capabilities, host, sglang_names
from specplug_sglang.sglang_names import (
    FIELDS,
    FUNCTIONS,
    MEMBERS,
    OBJECTS,
    OTHER_FIELDS,
    OTHER_FUNCTIONS,
)
from specplug_sglang.versions import installed

TOLD = "specplug-sglang was tested with sglang 0.5.17, 0.5.23; install one of them"


def test_names_of_the_tested_version_are_as_listed():
    sglang_names.check_names()


def test_other_version_is_refused_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(capabilities, "version", lambda name: "0.6.0")
    with pytest.raises(UsageError) as raised:
        host.host.describe()
    assert str(raised.value) == f"sglang 0.6.0; {TOLD}"
    with caplog.at_level(logging.ERROR, "specplug_sglang"):
        specplug_sglang.register()  # SGLang itself goes on
    assert [record.getMessage() for record in caplog.records] == [f"sglang 0.6.0; {TOLD}"]


def test_changed_function_is_refused_before_anything_starts(monkeypatch, prompts):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    monkeypatch.setattr(MHATokenToKVPool, "move_kv_cache", lambda self, target: None)
    told = rf"move_kv_cache\(self, target\), expected \(self, tgt_loc, src_loc\); {TOLD}"
    with pytest.raises(UsageError, match=told) as raised, running("EAGLE3"):
        pass
    assert "\n" not in str(raised.value)


def test_removed_method_is_refused(monkeypatch):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    monkeypatch.delattr(SpeculativeAlgorithm, "need_topk")
    with pytest.raises(UsageError, match=f"there is no .*SpeculativeAlgorithm.need_topk; {TOLD}"):
        sglang_names.check_names()


def test_removed_field_is_refused(monkeypatch):
    from sglang.srt.managers.utils import GenerationBatchResult

    monkeypatch.delitem(GenerationBatchResult.__dataclass_fields__, "accept_lens")
    told = f"GenerationBatchResult has no field accept_lens; {TOLD}"
    with pytest.raises(UsageError, match=told):
        sglang_names.check_names()


@pytest.mark.parametrize("listed", [FUNCTIONS, MEMBERS, FIELDS])
def test_every_listed_name_is_compared(listed, monkeypatch):
    elsewhere = {**OTHER_FUNCTIONS.get(installed(), {}), **OTHER_FIELDS.get(installed(), {})}
    for name in listed.keys() - elsewhere.keys():
        with monkeypatch.context() as changed:
            changed.setitem(listed, name, f"{listed[name]}, something")
            with pytest.raises(UsageError, match=TOLD):
                sglang_names.check_names()


@pytest.mark.parametrize("place", [place for place in OBJECTS if "." not in place])
def test_missing_attribute_is_refused(place):
    names = OBJECTS[place].split(", ")
    found = SimpleNamespace(**dict.fromkeys(names[:-1]))
    with pytest.raises(UsageError, match=f"SimpleNamespace has no {names[-1]}; {TOLD}"):
        sglang_names.check_objects(**{place: found})


def test_model_without_a_needed_part_is_refused():
    model = SimpleNamespace(model=SimpleNamespace(norm="norm"))
    assert sglang_names.part_of(model, "model.norm") == "norm"
    told = "SGLang's SimpleNamespace has no model.embed_tokens, which the algorithm needs"
    with pytest.raises(UsageError, match=told):
        sglang_names.part_of(model, "model.embed_tokens")


def test_all_that_is_imported_of_sglang_is_listed():
    listed = set()
    others = [name for functions in OTHER_FUNCTIONS.values() for name in functions]
    for name in (*FUNCTIONS, *FIELDS, *MEMBERS, *others):
        module, _, path = name.partition(":")
        listed.add(f"{module}:{path.split('.')[0]}")
        listed.add(":".join(module.rsplit(".", 1)))
    loading = {"sglang:Engine", "sglang.srt.plugins:load_plugins"}
    loading |= {"sglang.srt.server_args:prepare_server_args"}
    loading |= {"sglang.srt.arg_groups.overrides:resolving_view"}
    for file in Path(specplug_sglang.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                used = {f"{node.module}:{each.name}" for each in node.names}
                assert used <= listed | loading, file.name


def test_package_is_found_by_its_entry_points():
    (plugin,) = entry_points(group="sglang.srt.plugins", name="specplug")
    (found,) = entry_points(group="specplug.hosts", name="sglang")
    assert (plugin.load(), found.load()) == (specplug_sglang.register, host.host)
