"""The changes to vLLM's classes: one list, from which they are made.

Each is a function that is wrapped once in a process. It does what it did for an engine without one
of our algorithms. README.md has the list as a table, which make_readme.py makes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import attrs

from specplug_vllm import config_patches, vllm_names
from specplug_vllm.forms import Names, check_function, find
from specplug_vllm.run_settings import algorithm_of
from specplug_vllm.v1 import cpu_sampling
from specplug_vllm.v1 import names as v1_names
from specplug_vllm.v1 import runner_patches as v1_patches
from specplug_vllm.v2 import names as v2_names
from specplug_vllm.v2 import runner_patches as v2_patches
from specplug_vllm.versions import TESTED, WITH_RUNNER_V2, check_version, installed_version
from specplug_vllm.vllm_names import PROPOSER

_MARK = "_specplug"
_OLD, _NEW = ("0.25.0",), ("0.32.0",)
_V2 = "Model runner V2"
_PAYOFF = "Drafts that do not pay"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_SAMPLER = "vllm.v1.sample.rejection_sampler"


class When(Enum):
    """When a function is wrapped. Earlier its module may not be imported."""

    START = "a process of vLLM starts"
    SCHEDULER = "the scheduler's class is asked for"
    V1 = "model runner V1 makes our proposer"
    V1_CPU = "model runner V1 makes it on a CPU"
    V2 = "model runner V2 makes our speculator"


@attrs.frozen(kw_only=True)
class Patch:
    """A function of vLLM's that is wrapped.

    Attributes:
        place: its module and name, as ``forms`` has it.
        parameters: its form, which is compared with what is installed before an algorithm runs.
        parameters_of: its form in the versions of vLLM in which that is another.
        wrapper: is called in its place, with the original before the arguments.
        why: why the function must be wrapped.
        upstream: the change to vLLM that would end it.
        section: heading of docs/hosts.md with the code of that change.
        test: drives it, beside the comparison at start.
        runner: the model runner that needs it: "V1", "V2", or both.
        versions: of vLLM in which it is wrapped.
        when: the moment at which it is wrapped.
        also: a module that imports the function, if that is loaded already.
    """

    place: str
    parameters: str
    wrapper: Callable[..., Any]
    why: str
    upstream: str
    section: str
    test: str
    runner: str
    parameters_of: Mapping[str, str] = attrs.field(factory=dict)
    versions: tuple[str, ...] = TESTED
    when: When
    also: str = ""

    def check(self) -> None:
        """Compare the function's form with that of the installed vLLM.

        Raises:
            UsageError: they differ.
        """
        form = self.parameters_of.get(installed_version() or "", self.parameters)
        check_function(self.place, form)

    def apply(self) -> None:
        """Wrap the function, unless it is wrapped already."""
        owner, name, found = find(self.place)
        original: Any = found.fget if isinstance(found, property) else found
        if hasattr(original, _MARK):
            return
        wrapper = self.wrapper

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(wrapped, _MARK, True)
        setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)
        if self.also in sys.modules:
            setattr(sys.modules[self.also], name, wrapped)


def _patch_scheduler_first(original: Callable[..., Any], config: Any) -> Any:
    """Patch the scheduler's class before vLLM gets it: no process imports it for the patches."""
    _apply(When.SCHEDULER)
    return original(config)


def _make_speculator(
    original: Callable[..., Any], vllm_config: Any, device: Any, *more: Any
) -> Any:
    """Make our speculator, after its model runner is patched."""
    name = algorithm_of(vllm_config)
    if name is None:
        return original(vllm_config, device, *more)
    patch_runner_v2()
    from specplug_vllm.v2.speculator import VllmSpeculator

    return VllmSpeculator(vllm_config, device, name)


_of_v1 = functools.partial(Patch, runner="V1")
_of_v2 = functools.partial(Patch, runner="V2", versions=WITH_RUNNER_V2)

PATCHES = (
    Patch(
        place="vllm.config:VllmConfig.num_lookahead_tokens",
        parameters="self",
        wrapper=config_patches.num_lookahead_tokens,
        why="a draft model writes keys after the tokens that are scheduled",
        upstream="a proposer that says how many",
        section=PROPOSER,
        test="tests/test_scheduling.py::test_plain_engine_after_a_hosted_one_is_plain",
        runner="V1, V2",
        versions=_NEW,
        when=When.START,
    ),
    Patch(
        place="vllm.config:SchedulerConfig.get_scheduler_cls",
        parameters="self",
        wrapper=_patch_scheduler_first,
        why="the scheduler is wrapped, before it is made",
        upstream="what ends the two patches of `Scheduler`",
        section=PROPOSER,
        test="tests_v2/test_pauses.py::test_tokens_are_plain_with_pauses",
        runner="V1, V2",
        when=When.START,
    ),
    Patch(
        place=f"{_SCHEDULER}.__init__",
        parameters=(
            "self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
            "hash_block_size, mm_registry, include_finished_set, log_stats"
        ),
        wrapper=config_patches.init_scheduler,
        why="a draft model writes keys after the tokens that are scheduled; drafts stop while they "
        "do not pay",
        upstream="a proposer that says how many; an interface for the schedule of draft lengths",
        section=_PAYOFF,
        test="tests_v2/test_pauses.py::test_tokens_are_plain_with_pauses",
        runner="V1, V2",
        when=When.SCHEDULER,
    ),
    _of_v2(
        place=f"{_SCHEDULER}.update_from_output",
        parameters="self, scheduler_output, model_runner_output",
        wrapper=v2_patches.update_from_output,
        why="what drafts give is measured where results arrive",
        upstream="an interface for the schedule of draft lengths",
        section=_PAYOFF,
        test="tests_v2/test_pauses.py::test_step_that_a_request_begins_with_is_not_measured",
        when=When.SCHEDULER,
    ),
    _of_v2(
        place="vllm.config:VllmConfig._get_v2_model_runner_unsupported_features",
        parameters="self",
        wrapper=config_patches.unsupported_features,
        why="it refuses a `custom_class`",
        upstream="its name in the list",
        section=_V2,
        test="tests_v2/test_identity.py::test_greedy_tokens_are_plain",
        when=When.START,
    ),
    _of_v2(
        place="vllm.config:VllmConfig.__post_init__",
        parameters="self",
        wrapper=config_patches.post_init,
        why="it turns async scheduling off, and schedules drafts of one length",
        upstream="its name in the list; an interface for the schedule of draft lengths",
        section=_V2,
        test="tests_v2/test_async_scheduling.py::test_log_says_that_async_scheduling_is_on",
        when=When.START,
    ),
    _of_v2(
        place="vllm.v1.worker.gpu.spec_decode:init_speculator",
        parameters="vllm_config, device",
        parameters_of={"0.32.0": "vllm_config, device, req_states"},
        wrapper=_make_speculator,
        why="it makes the speculators that it knows",
        upstream="a branch for `custom_class`",
        section=_V2,
        test="tests_v2/test_identity.py::test_greedy_tokens_are_plain",
        when=When.START,
        also="vllm.v1.worker.gpu.model_runner",
    ),
    _of_v2(
        place=f"{_RUNNER_V2}.load_model",
        parameters="self, load_dummy_weights, args, kwargs",
        parameters_of={"0.32.0": "self, load_dummy_weights, args, model, kwargs"},
        wrapper=v2_patches.load_model,
        why="an algorithm captures layers of the target, and needs the exact sampler",
        upstream="a call after the target is loaded",
        section=_V2,
        test="tests_v2/test_identity.py::test_seeded_tokens_are_plain",
        when=When.V2,
    ),
    _of_v2(
        place=f"{_RUNNER_V2}.execute_model",
        parameters=(
            "self, scheduler_output, intermediate_tensors, dummy_run, skip_attn_for_dummy_run, "
            "is_profile"
        ),
        parameters_of={
            "0.32.0": "self, scheduler_output, intermediate_tensors, dummy_run, "
            "skip_attn_for_dummy_run, is_profile, context_len, valid_dummy_state_slots, "
            "randomize_inputs"
        },
        wrapper=v2_patches.execute_model,
        why="requests begin, get blocks, end and lose them",
        upstream="a call that tells",
        section=_V2,
        test="tests_v2/test_scheduling.py::test_aborted_requests_leave_others_alone",
        when=When.V2,
    ),
    _of_v2(
        place="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        parameters="self",
        wrapper=v2_patches.init_candidates,
        why="with several draft lengths a batch may find no graph of its width",
        upstream="to look further than the next size, as 0.32.0 does",
        section=_PAYOFF,
        test="tests_v2/test_pauses.py::test_every_batch_finds_a_graph_of_its_width",
        versions=_OLD,
        when=When.V2,
    ),
    _of_v1(
        place=f"{_RUNNER_V1}.execute_model",
        parameters="self, scheduler_output, intermediate_tensors",
        wrapper=v1_patches.execute_model,
        why="requests end and lose their blocks",
        upstream="a call that tells",
        section="Requests that end, or lose their blocks",
        test="tests/test_scheduling.py::test_ended_requests_are_told_once",
        when=When.V1,
    ),
    _of_v1(
        place=f"{_RUNNER_V1}._setup_eagle3_aux_hidden_state_outputs",
        parameters="self",
        wrapper=v1_patches.set_up_captures,
        why="any layers are captured, and the runner is handed over",
        upstream="`load_model(target, runner)`, and layers that a proposer names",
        section=PROPOSER,
        test="tests/test_greedy.py::test_tokens_of_every_algorithm_are_plain",
        when=When.V1,
    ),
    _of_v1(
        place=f"{_RUNNER_V1}.propose_draft_token_ids",
        parameters=(
            "self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
            "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata, "
            "slot_mappings"
        ),
        wrapper=v1_patches.propose_draft_token_ids,
        why="hidden states and positions reach a `custom_class`",
        upstream="to pass the arguments on that it has",
        section="A proposer gets what the runner has",
        test="tests/test_greedy.py::test_tokens_of_every_algorithm_are_plain",
        when=When.V1,
    ),
    _of_v1(
        place=f"{_SAMPLER}:expand_batch_to_tokens",
        parameters="x, cu_num_tokens, num_tokens, replace_from, replace_to",
        wrapper=cpu_sampling.expand_batch_to_tokens,
        why="on a CPU sampled drafts are verified with settings that nothing wrote",
        upstream="a kernel that fills its output",
        section="Sampled requests on a CPU",
        test="tests/test_sampled.py::test_sampled_tokens_are_distributed_as_plain",
        when=When.V1_CPU,
    ),
    _of_v1(
        place=f"{_SAMPLER}:apply_sampling_constraints",
        parameters="logits, cu_num_draft_tokens, sampling_metadata",
        wrapper=cpu_sampling.apply_sampling_constraints,
        why="a step without drafts ends the engine where all requests have `top_k`",
        upstream="to return where there are no rows",
        section="Sampled requests on a CPU",
        test="tests/test_sampled.py::test_sampled_tokens_are_distributed_as_plain",
        when=When.V1_CPU,
    ),
)
"""All of them. What is set on a model runner besides is ``written`` in the *names* modules."""


def patch_process() -> None:
    """Have vLLM take our algorithms where it takes its own: in any of its processes."""
    _apply(When.START)


def patch_runner_v1(*, on_cpu: bool) -> None:
    """Wrap what model runner V1 needs.

    Raises:
        UsageError: this vLLM was not tested, or has other forms.
    """
    when = (When.V1, When.V1_CPU) if on_cpu else (When.V1,)
    _patch_runner(v1_names.NAMES, *when)


def patch_runner_v2() -> None:
    """Wrap what model runner V2 needs.

    Raises:
        UsageError: this vLLM was not tested, or has other forms.
    """
    _patch_runner(v2_names.NAMES, When.V2)


def _patch_runner(names: Names, *when: When) -> None:
    check(names, *when)
    _apply(When.START, *when)


def check(names: Names, *when: When) -> None:
    """Compare the forms of all that a model runner needs with those of the installed vLLM.

    Args:
        names: of that runner alone.
        when: the moments of that runner's patches; modules of the other runner may be missing.

    Raises:
        UsageError: this vLLM was not tested, or has other forms.
    """
    check_version()
    vllm_names.NAMES.check()
    names.check()
    for patch in _patches(When.START, When.SCHEDULER, *when):
        patch.check()


def _patches(*when: When) -> Iterator[Patch]:
    """Yield those of the installed vLLM that are made then."""
    for patch in PATCHES:
        if patch.when in when and installed_version() in patch.versions:
            yield patch


def _apply(*when: When) -> None:
    for patch in _patches(*when):
        patch.apply()
