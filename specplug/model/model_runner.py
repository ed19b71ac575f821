"""The target: any causal LM of transformers, run over our paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from specplug.distributed.rank_group import RankGroup
from specplug.errors import warn_fallback
from specplug.kernels.cpu_kernels import CPUKernels, load_cpu_kernels
from specplug.kernels.dispatch import HALF, runs_pass_kernels
from specplug.kv.tensors import KVShape, drop_tensors
from specplug.model.attention import running
from specplug.model.checkpoint import (
    CPU,
    load_checkpoint,
    weights_fingerprint,
    weights_progress,
)
from specplug.model.cpu_layer import fuse_cpu_layers
from specplug.model.direct_calls import shorten_calls
from specplug.model.fused_norms import fuse_norms
from specplug.model.graph_recorder import GraphRecorder
from specplug.model.graph_runner import GraphRunner
from specplug.model.hidden_states import HiddenStateCapture, Point
from specplug.model.layer_fusion import FusedLayer
from specplug.model.model_check import ModelCheck
from specplug.model.padded_passes import PaddedPasses, PassOutput, PassPart, Record, size_of
from specplug.model.paged_plan import JoinedPlan, PagedPlan
from specplug.model.pass_form import PassForm, PassSize, batch_bucket
from specplug.model.quantization import count_parameters, drop_weights, stored_tensors
from specplug.model.rotary import FIXED, RotaryByLength
from specplug.model.rotary_table import keep_rotary_tables
from specplug.model.sharded_mlp import shard_mlps
from specplug.model.threads import set_threads
from specplug.speculative.draft import Draft
from specplug.speculative.runtime import KVCache
from specplug.startup import Startup

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_LOGITS = "logits"
_DENSE_ROWS = 16
"""A product of fewer rows costs as much: drafts of differing widths are not packed then."""
_CHECK = "checking the model"
"""The part of a start that has two halves: before and after the layers are fused."""


class ModelRunner:
    """Loads the target and runs passes over flattened tokens.

    Args:
        path: folder or hub id.
        dtype: of weights and activations; None: what the checkpoint says.
        device: where it runs.
        ranks: over which its MLPs are sharded; None: it is not sharded.
        identified: whether ``fingerprint`` is wanted.
        skip_check: do not check that it gives its own logits here.
        compiled: have the CPU's kernels compiled, where one thread computes in float32.
        num_threads: torch's on the CPU; None: one for a small model.
        row_invariant: on a GPU in half precision each row's bits depend on nothing but the row.
        startup: of the run, which takes the times; None: nobody wants them.

    Attributes:
        fingerprint: of its weights as they were loaded; None if it was not wanted.
        records: whether ``verify``'s passes are replayed as CUDA graphs.
        row_invariance: whether each row's bits depend on nothing but the row: "on", or "off: " and
            why; "not needed" in float32 and float64, whose rounding changes no token short of a
            tie.
        cpu_kernels: with which passes compute on the CPU; None: torch.
        cpu_kernels_state: "on", or "off: " and why.
        kernels: with which passes attend on this device in this dtype; None: torch.

    Raises:
        CheckpointError: there is no such model, it cannot be loaded, or the check fails.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype | None,
        device: torch.device,
        ranks: RankGroup | None = None,
        *,
        identified: bool = False,
        skip_check: bool = False,
        row_invariant: bool = True,
        compiled: bool = True,
        num_threads: int | None = None,
        startup: Startup | None = None,
    ) -> None:
        self.device = device
        self._startup = startup = startup or Startup()
        # Sharded weights are cut on the host, whose copy is the mapped file.
        with startup.part("loading weights"), _progress_of(startup):
            self.model = load_checkpoint(path, dtype, device if ranks is None else CPU).eval()
        if self.model.dtype is torch.float64 and _has_experts(self.model.config):
            self.model.set_experts_implementation("eager")  # grouped products lack float64
        self.fingerprint = weights_fingerprint(self.model) if identified else None
        self._ranks = ranks
        if ranks is not None:
            shard_mlps(self.model, ranks)
            self.model.to(device)
        self.rotary = RotaryByLength(self.model)
        self.capture = HiddenStateCapture(self.model)
        self.dtype: torch.dtype = self.model.dtype
        config = self.model.config.get_text_config()
        self.config: Any = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.context_len: int = self.rotary.context_len
        self.cache = KVCache([], [])
        self.kernels = _attention_kernels(device, self.dtype)
        if device.type == "cpu":
            set_threads(num_threads, self.num_parameters)
        found: CPUKernels | str = "disable_cpu_kernels"
        if compiled:
            found = _find_cpu_kernels(device, self.dtype, startup)
        self.cpu_kernels = None if isinstance(found, str) else found
        self.cpu_kernels_state = f"off: {found}" if isinstance(found, str) else "on"
        check = None if skip_check else self._begin_check(path)
        self.kv_shape = check.kv_shape if check else _kv_shape_of(config)
        self.num_layers = len(self.capture.layers)
        self._fused_layers: Sequence[FusedLayer] = []
        self.row_invariance = _without_kernels(self.dtype, device)
        with startup.part("fusing layers"):
            self._fuse(row_invariant)
        if check is not None:
            self._end_check(check)
            if check.row_variance is not None and self.row_invariance == "on":
                self._tell_row_variance(check.row_variance)
        self.records = False
        self._graphs: dict[frozenset[str], GraphRunner] = {}
        self._verified: GraphRunner | None = None
        self._padded: PaddedPasses | None = None
        self._recorder: GraphRecorder | None = None
        self._buffers: dict[Hashable, Tensor] = {}

    @property
    def embed_tokens(self) -> nn.Module:
        """The input embedding."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def lm_head(self) -> nn.Module:
        """The output head."""
        module: nn.Module = self.model.get_output_embeddings()
        return module

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output, as the model's configuration says."""
        generation = getattr(self.model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None:
            found = getattr(self.config, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def num_parameters(self) -> int:
        """The number of the target's parameters, tied ones counted once."""
        return count_parameters(self.model)

    @property
    def num_bytes(self) -> int:
        """Bytes of the target's weights, tied ones once."""
        return sum(tensor.nbytes for _, tensor in stored_tensors(self.model))

    def _fuse(self, row_invariant: bool) -> None:
        """Replace modules by faster ones that give the same."""
        fuse_norms(self.model)
        if self.kernels is not None:
            self._use_kernels(row_invariant)
        elif self.device.type == "cpu":
            self.rotary.begin(None)
            self._fused_layers = fuse_cpu_layers(self.model, self.capture.layers, self.cpu_kernels)
        shorten_calls(self.model, keep=self.capture.hooked)

    def _use_kernels(self, row_invariant: bool) -> None:
        """Have the modules compute by our kernels. They need Triton, which is not everywhere."""
        from specplug.model.half_precision import replace_modules

        self.rotary.begin(None)
        layers = self.capture.layers
        self._fused_layers, variant = replace_modules(
            self.model, layers, row_invariant=row_invariant
        )
        if self.rotary.rule is FIXED:
            keep_rotary_tables(self.model, self.context_len, self.dtype, self.device)
        self.row_invariance = "on" if row_invariant else "off: disable_row_invariance"
        if variant:
            self._tell_row_variance(f"products of shape {', '.join(variant)} on this card")

    def _tell_row_variance(self, where: str) -> None:
        """Turn row invariance off, in words, for where it does not hold, and warn of it."""
        self.row_invariance = f"off: {where}"
        warn_fallback(
            f"row invariance does not hold for {type(self.model).__name__}, {where}: "
            "tokens may depend on what else is in a batch"
        )

    @property
    def num_fused_layers(self) -> int:
        """The decoder layers whose forward is ours, of kernels."""
        return len(self._fused_layers)

    def _begin_check(self, path: str) -> ModelCheck:
        """Run the model before anything in it is changed."""
        with self._startup.part(_CHECK), self._stepping():
            return ModelCheck(
                path,
                self.model,
                self.capture.layers,
                self.context_len,
                self._begin_checked_pass,
                self.kernels,
                self.cpu_kernels,
            )

    def _end_check(self, check: ModelCheck) -> None:
        def run(token_ids: Tensor, plan: PagedPlan, logits_rows: Tensor | int) -> Tensor:
            return self.prefill(token_ids, plan, logits_rows)[0]

        with self._startup.part(_CHECK), self._stepping():
            check.compare(run, self.cache)

    def _stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.stepping()

    def _begin_checked_pass(self, rows: int, lengths: Tensor) -> None:
        """Begin a pass of the check in all ranks, with the rotary frequencies of these lengths."""
        if self._ranks is not None:
            self._ranks.agree(rows)
        self.rotary.begin(lengths)

    def record_graphs(self) -> None:
        """Replay passes as CUDA graphs from now on. Where torch attends, those of ``verify``
        alone: padding would leave NaN in slot 0, and lengths are part of a graph.

        With other ranks all passes are padded, to forms that the ranks agree on: a collective in a
        graph must be in a graph of every rank.
        """
        if self._ranks is None:
            self.records = True
            self._recorded(frozenset())
        if self.kernels is not None:
            self._recorder = GraphRecorder(beside_threads=self._ranks is not None)
            self.pad_passes(self._recorder)

    def pad_passes(self, record: Record | None) -> None:
        """Pad passes to few forms from now on; alone, those of differing rows.

        Args:
            record: makes their recordings; None: they run as they are.
        """
        self._padded = PaddedPasses(self._padded_forward, record, waits=self._ranks is not None)

    def _recorded(self, kinds: frozenset[str]) -> GraphRunner:
        """Return the recorded pass that keeps all points of these kinds. A pass is recorded anew
        for the kinds that requests want, and not for each choice of points among them."""
        if kinds not in self._graphs:
            points = self.capture.points(kinds)
            self._graphs[kinds] = GraphRunner(
                partial(self._keeping_forward, points=points),
                pads=self.kernels is not None,
                leads=True,
            )
        return self._graphs[kinds]

    def begin_pass(
        self,
        prefill: PassPart | None,
        decode: PassPart | None,
        points: tuple[Point, ...] = (),
    ) -> PassForm | None:
        """Begin a pass of either part, both or none: wait for the other ranks.

        Returns:
            The form that it is padded to, for ``run_padded``; None: it runs as it is, and if it has
            no part with one row of nobody.
        """
        self._verified = None
        kinds = frozenset(point.kind for point in points)
        size = size_of(prefill, decode, kinds)
        if self._ranks is not None:
            return self._agree(self._ranks, size)
        if self._padded is None or (prefill is None and decode is not None and _is_dense(decode)):
            return None
        form = PassForm.of([size])
        return form if form is not None and self._padded.takes(form) else None

    def _agree(self, ranks: RankGroup, size: PassSize) -> PassForm | None:
        """Agree with the other ranks on the form of a pass. All know the same passes of the same
        forms, so all choose the same."""
        padded = self._padded
        wish = size.as_text() if padded is not None and padded.failure is None else ""
        wishes = ranks.agree(max(size.rows, 1), wish)
        if padded is None or not wish:
            return None
        if not all(wishes):
            padded.give_up(f"rank {wishes.index('')} does not record its passes")
            return None
        form = PassForm.of([PassSize.from_text(each) for each in wishes])
        if form is None or not padded.takes(form):
            return None
        ranks.pad(form.rows)
        return form

    def run_padded(
        self,
        form: PassForm,
        prefill: PassPart | None,
        decode: PassPart | None,
        like: PagedPlan,
    ) -> tuple[PassOutput | None, PassOutput | None]:
        """Run a pass padded to a form, of either part or both; see ``PaddedPasses``."""
        assert self._padded is not None
        return self._padded(form, (prefill, decode), like)

    @property
    def num_padded_recordings(self) -> int:
        """How many forms of padded passes are recorded."""
        return 0 if self._padded is None else self._padded.num_recordings

    @property
    def recordings(self) -> dict[frozenset[str], int]:
        """How many shapes of ``verify``'s pass are recorded, by the kinds of points it keeps."""
        return {kinds: graph.num_recordings for kinds, graph in self._graphs.items()}

    @property
    def recorders(self) -> list[GraphRunner | PaddedPasses]:
        """What records passes: of ``verify`` for each choice of points that has occurred, and
        padded ones."""
        return [*self._graphs.values(), *((self._padded,) if self._padded else ())]

    @property
    def pads(self) -> bool:
        """Whether passes are padded, and recorded when their form comes for the second time."""
        return self._padded is not None

    @property
    def graph_failure(self) -> str | None:
        """Why recording failed; None if it did not."""
        return next((each.failure for each in self.recorders if each.failure is not None), None)

    def prefill(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        points: tuple[Point, ...] = (),
    ) -> PassOutput:
        """Run a pass over prompt tokens, and in a mixed step over the nodes of drafts after them.

        Args:
            token_ids: [R] int64.
            plan: their positions and what they see.
            logits_rows: [M] int64 rows whose logits are wanted, or 0: those of all rows.
            points: where the pass is to be read.
        """
        return self._forward(token_ids, plan, logits_rows, points)

    def verify(self, draft: Draft, plan: PagedPlan, points: tuple[Point, ...] = ()) -> PassOutput:
        """Run a pass over the nodes of a draft: as ``prefill``, with the logits of all rows.

        A recorded pass has the same rows for every request: nodes that do not count run too, and
        what they give is dropped.

        Args:
            plan: of the draft's nodes.
        """
        if not self.records:
            return self._forward(draft.flat_tokens, plan, 0, points)
        graph = self._recorded(frozenset(point.kind for point in points))
        dense = draft if draft.widths is None else attrs.evolve(draft, widths=None)
        outputs: PassOutput = graph(dense, plan.of_chains())
        if draft.padding is None:
            self._verified = graph
            return outputs
        logits, captured, kept = outputs
        return (
            draft.select(logits),
            {name: draft.select(tensor) for name, tensor in captured.items()},
            {point: draft.select(tensor) for point, tensor in kept.items()},
        )

    def follow(
        self, key: Hashable, sequel: Callable[[Draft, PagedPlan, PassOutput], Result]
    ) -> Result | None:
        """Run what follows the pass of ``verify`` over nodes of equal widths, recorded with it.

        Args:
            key: stands for ``sequel``: of equal keys the same is recorded.
            sequel: takes the draft and a plan of its nodes as chains, in tensors that are padded
                and the same in every replay, and the pass's output for them.

        Returns:
            What ``sequel`` returns, cut to the batch. None if that pass was not replayed, or
            another one has begun since; then nothing is run.
        """
        found: Result | None = None
        if self._verified is not None:
            found = self._verified.follow(key, sequel)
        return found

    def close(self) -> None:
        """Free the weights, the graphs and the cache, even if a plugin still holds the model."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._verified = None
        if self._padded is not None:
            self._padded.close()
        if self._recorder is not None:
            self._recorder.close()
        self._padded = self._recorder = None
        self._buffers.clear()
        drop_tensors(self.cache)
        for layer in self._fused_layers:
            layer.close()
        drop_weights(self.model)

    def _forward(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        points: tuple[Point, ...] = (),
    ) -> PassOutput:
        self.capture.begin(points)
        self.rotary.begin(plan.lengths)
        if self._ranks is not None:
            self.capture.routed_rows = self._ranks.own
        with running(plan, self.cache):
            out = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows,
            )
        kept = self.capture.collect_points() if points else {}
        return out.logits.squeeze(0), self.capture.collect(), kept

    def _keeping_forward(
        self, draft: Draft, plan: PagedPlan, points: tuple[Point, ...]
    ) -> PassOutput:
        """Run a pass as it is recorded. What stood at the points goes to buffers that all
        recordings share: a recording of each shape would else keep that memory for itself."""
        logits, captured, kept = self._forward(draft.flat_tokens, plan.of_nodes(draft), 0, points)
        return logits, captured, self._buffered(kept)

    def _padded_forward(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        kinds: frozenset[str],
    ) -> PassOutput:
        """Run a padded pass. All that it returns goes to buffers that its forms share."""
        points = self.capture.points(kinds)
        logits, captured, kept = self._forward(token_ids, plan, logits_rows, points)
        (logits,) = self._buffered({_LOGITS: logits}).values()
        return logits, self._buffered(captured), self._buffered(kept)

    def _buffered(self, tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Copy tensors of leading size R to the buffers of their names."""
        found = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < len(tensor):
                buffer = self._buffers[name] = torch.empty_like(tensor)
            found[name] = buffer[: len(tensor)].copy_(tensor)
        return found


def _is_dense(decode: PassPart) -> bool:
    """Return whether a decode step is left to ``verify``, which is recorded for requests of equal
    widths: they are, or they are few enough to be padded to that."""
    plan = decode.plan
    return plan.padding is None or batch_bucket(plan.bs) * plan.width <= _DENSE_ROWS


def _progress_of(startup: Startup) -> AbstractContextManager[None]:
    """Have the start told how many tensors are loaded, if somebody wants to know."""
    return weights_progress(startup.advance) if startup.is_reported else nullcontext()


def _kv_shape_of(config: Any) -> KVShape:
    """Derive the shape of the cache from the configuration, for a model that is not checked."""
    heads: int = config.num_attention_heads
    return KVShape(
        config.num_hidden_layers,
        getattr(config, "num_key_value_heads", None) or heads,
        # Latent attention (DeepSeek) calls the rotated part alone ``head_dim``.
        getattr(config, "qk_head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // heads,
    )


def _without_kernels(dtype: torch.dtype, device: torch.device) -> str:
    """Return what ``row_invariance`` says where torch computes all."""
    if dtype not in HALF:
        return f"not needed in {str(dtype).removeprefix('torch.')}"
    return f"off: there are no kernels for this {device.type}"


def _attention_kernels(device: torch.device, dtype: torch.dtype) -> PagedAttention | None:
    """Return what attends on a GPU in half precision. Elsewhere torch attends."""
    if not runs_pass_kernels(device, dtype):
        return None
    from specplug.kernels.paged_attention_kernels import PagedAttention

    return PagedAttention(device)


def _find_cpu_kernels(
    device: torch.device, dtype: torch.dtype, startup: Startup
) -> CPUKernels | str:
    """Return the kernels of the CPU, or why there are none."""
    if device.type != "cpu":
        return f"they are not for {device.type}"
    if dtype != torch.float32:
        return f"they are not for {str(dtype).removeprefix('torch.')}"
    if torch.get_num_threads() > 1:
        return "they run on one thread, torch on several"
    with startup.part("compiling kernels"):
        return load_cpu_kernels()


def _has_experts(config: Any) -> bool:
    """Return whether layers are mixtures of experts, by the configuration."""
    names = "num_experts", "n_routed_experts", "num_local_experts"
    return any(getattr(config.get_text_config(), name, None) for name in names)
