"""What is wrapped of SGLang stands in one list, which the README's table is made of."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import make_readme
import pytest
import torch

import specplug_sglang
from specplug_sglang.patches import PATCHES, apply_patches
from specplug_sglang.sglang_names import FUNCTIONS, OTHER_FUNCTIONS
from specplug_sglang.verify_pass import SpecplugVerifyInput

TESTS = Path(__file__).parent
HOSTS = TESTS.parents[2] / "docs" / "hosts.md"
OURS = SimpleNamespace(worker=SimpleNamespace(num_draft_tokens=6, captures=True))


def wrapper_of(name):
    (found,) = [patch.wrapper for patch in PATCHES if patch.place.endswith(name)]
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.place.rpartition(":")[2])
def test_patch_is_compared_at_start_and_names_its_test(patch):
    for version in patch.versions:
        assert patch.place in {**FUNCTIONS, **OTHER_FUNCTIONS.get(version, {})}
    assert not patch.section or f"\n### {patch.section}\n" in HOSTS.read_text()
    file, _, test = patch.check.partition("::")
    assert f"\ndef {test}(" in (TESTS / file).read_text()


def test_tables_of_the_readme_are_made_of_the_declarations():
    text = make_readme.PAGE.read_text()
    assert make_readme.with_tables(text) == text, "run python hosts/sglang/make_readme.py"


def test_nothing_but_patches_assigns_to_sglang():
    for file in Path(specplug_sglang.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        of_sglang = {
            name.asname or name.name
            for node in imports
            if (node.module or "").startswith("sglang")
            for name in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert getattr(node.value, "id", "") not in of_sglang, file.name
            if isinstance(node, ast.Name) and node.id == "setattr":
                assert file.name == "patches.py"


def test_recorded_verifications_get_our_input():
    from sglang.srt.model_executor.runner import base_runner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    apply_patches()
    mask = torch.ones(4, dtype=torch.bool)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(spec_algorithm=OURS), buffers=SimpleNamespace(custom_mask=mask)
    )
    made = [
        base_runner.create_dummy_verify_input(OURS, mask, 6, False),
        DecodeCudaGraphRunner.get_spec_info(runner, 12),
    ]
    for each in made:
        assert isinstance(each, SpecplugVerifyInput)
        assert (each.custom_mask, each.draft_token_num, each.plan) == (mask, 6, None)


def test_recorded_verifications_of_sglangs_algorithms_are_as_before():
    own = SimpleNamespace()
    for name in ("create_dummy_verify_input", "get_spec_info"):
        runner = SimpleNamespace(
            model_runner=SimpleNamespace(spec_algorithm=own),
            buffers=SimpleNamespace(custom_mask=None),
        )
        given = own if name.startswith("create") else runner
        assert wrapper_of(name)(lambda *given: given, given, 3) == (given, 3)


def test_worker_without_a_draft_runner_has_no_draft_pool():
    wrapper = wrapper_of("get_draft_kv_pool")
    named = {"spec_algorithm": OURS, "server_args": None}
    ours, theirs = SimpleNamespace(draft_worker=None), SimpleNamespace(draft_worker="runner")
    assert wrapper(lambda **given: given, draft_worker=ours, **named) is None
    assert wrapper(lambda **given: given, draft_worker=theirs, **named) == {
        "draft_worker": theirs,
        **named,
    }


def test_patches_are_applied_once():
    from sglang.srt.batch_invariant_ops import batch_invariant_ops

    apply_patches()
    first = batch_invariant_ops.matmul_persistent
    apply_patches()
    assert batch_invariant_ops.matmul_persistent is first
