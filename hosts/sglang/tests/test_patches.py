"""The wrappers of SGLang's functions: what they change for our algorithms, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from specplug_sglang.patches import PATCHES, apply_patches
from specplug_sglang.sglang_names import FUNCTIONS, OTHER_FUNCTIONS
from specplug_sglang.verify_pass import SpecplugVerifyInput

OURS = SimpleNamespace(worker=SimpleNamespace(num_draft_tokens=6, captures=True))


def wrapper_of(name):
    (found,) = [patch.wrapper for patch in PATCHES if patch.place.endswith(name)]
    return found


def test_patches_are_functions_that_are_compared_at_start():
    for patch in PATCHES:
        for version in patch.versions:
            assert patch.place in {**FUNCTIONS, **OTHER_FUNCTIONS.get(version, {})}


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


def test_recorded_inputs_of_sglangs_algorithms_are_its_own():
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
