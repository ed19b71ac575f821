"""The target: any causal LM of transformers, loaded, sped up, checked, over our paged KV cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specplug.distributed.rank_group import RankGroup
from specplug.errors import warn_fallback
from specplug.kernels.kernel_table import (
    HALF,
    Operation,
    attention_kernels,
    choose,
    kernels_in_c,
    why_not_in_c,
)
from specplug.kv.tensors import KVShape, drop_tensors
from specplug.model.attention import running
from specplug.model.checkpoint import (
    CPU,
    load_checkpoint,
    weights_fingerprint,
    weights_progress,
)
from specplug.model.cpu_layer import CPUHead, fuse_cpu_head, fuse_cpu_layers
from specplug.model.direct_calls import shorten_calls
from specplug.model.fused_norms import fuse_norms
from specplug.model.hidden_states import HiddenStateCapture, Point
from specplug.model.layer_fusion import FusedLayer
from specplug.model.layer_range import LayerRange
from specplug.model.model_check import ModelCheck
from specplug.model.paired_rows import pair_rows
from specplug.model.quantization import (
    count_packed_modules,
    count_parameters,
    drop_weights,
    stored_tensors,
)
from specplug.model.rotary import FIXED, RotaryByLength
from specplug.model.rotary_table import keep_rotary_tables
from specplug.model.row_proof import RowProof
from specplug.model.sharded_mlp import shard_mlps
from specplug.speculative.paged_plan import JoinedPlan, PagedKVCache, PagedPlan
from specplug.startup import Startup

PassOutput = tuple[Tensor, dict[str, Tensor], dict[Hashable, Tensor]]
"""The result of a pass: logits [M, V]; the captured outputs that algorithms asked for, by name; and
the tensors at the points to read. Both have leading size R."""

_SMALL_MODEL = 50_000_000
"""Parameters, below which one thread is faster than several."""
_CHECK = "checking the model"
"""The part of a start that has two halves: before and after the layers are fused."""


class Target:
    """A causal LM of transformers that attends to our paged KV cache.

    It is loaded, its modules are replaced by faster ones, and our passes are compared with its own.

    Args:
        path: folder or hub id.
        dtype: of weights and activations; None: what the checkpoint says.
        device: where it runs.
        ranks: over which its MLPs are sharded; None: it is not sharded.
        identified: whether ``fingerprint`` is wanted.
        skip_check: do not check that it gives its own logits here.
        num_threads: torch's on the CPU; None: one for a small model.
        row_invariant: in half precision each row's bits depend on nothing but the row.
        startup: of the run, which takes the times; None: no times are kept.

    Attributes:
        model: the module of transformers, changed in place.
        config: of its text part.
        rotary: its rotary modules, which take frequencies by row.
        capture: what its passes keep besides logits.
        cache: of its keys and values; the run's pool fills it.
        kv_shape: of that cache.
        attentions: the kinds of attention of its layers; none if it was not checked.
        context_len: tokens of the longest sequence.
        fingerprint: of its weights as they were loaded; None if it was not wanted.
        row_invariance: whether each row's bits depend on nothing but the row: "on", "on, " and what
            is not proved, or "off: " and why; "not needed" in float32 and float64, whose rounding
            changes no token short of a tie.
        cpu_kernels: with which passes attend on the CPU; None: torch.
        cpu_kernels_state: "on", or "off: " and why.
        kernels: with which passes attend on this device in this dtype; None: torch.
        draft_ranges: layers that algorithms draft with, by ``LayerRange.wish``.

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
        num_threads: int | None = None,
        startup: Startup | None = None,
    ) -> None:
        self.device = device
        self.ranks = ranks
        self._startup = startup or Startup()
        self.model = self._load(path, dtype)
        self.fingerprint = weights_fingerprint(self.model) if identified else None
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
        self.cache = PagedKVCache()
        self.kernels = attention_kernels(device, self.dtype)
        if device.type == "cpu":
            _set_threads(num_threads, self.num_parameters)
        on_cpu = device.type == "cpu"
        with self._startup.part("compiling kernels") if on_cpu else nullcontext():
            self.cpu_kernels = kernels_in_c(Operation.ATTENTION, device, self.dtype)
        reason = why_not_in_c(Operation.ATTENTION, device, self.dtype)
        self.cpu_kernels_state = "on" if reason is None else f"off: {reason}"
        check = None if skip_check else self._begin_check(path)
        self.kv_shape = check.kv_shape if check else _kv_shape_of(config)
        self.attentions = frozenset(check.attentions if check else ())
        self.num_layers = len(self.capture.layers)
        self.draft_ranges: dict[str, LayerRange] = {}
        self._fused_layers: Sequence[FusedLayer] = []
        self._fused_head: CPUHead | None = None
        if self.kernels is None:
            self.row_invariance = row_invariance_without_kernels(self.dtype, device, row_invariant)
        self._fuse(row_invariant)
        if check is not None:
            self._end_check(check)
            if row_invariant and (self.kernels is not None or (on_cpu and self.dtype in HALF)):
                self._prove_rows(check)
        elif self.row_invariance == "on":
            self.row_invariance = "on, not proved: skip_model_check"

    @cached_property
    def embed_tokens(self) -> nn.Module:
        """The input embedding."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @cached_property
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

    @property
    def num_fused_layers(self) -> int:
        """The decoder layers whose forward is ours, of kernels."""
        return len(self._fused_layers)

    def forward(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        points: tuple[Point, ...] = (),
    ) -> PassOutput:
        """Run a pass, as it is, and return its result.

        Args:
            token_ids: [R] int64.
            plan: their positions and what they see.
            logits_rows: [M] int64 rows whose logits are wanted, or 0: those of all rows.
            points: where the pass is to be read.
        """
        self.capture.begin(points)
        self.rotary.begin(plan.lengths)
        if self.ranks is not None:
            self.capture.routed_rows = self.ranks.own
        with running(plan, self.cache):
            out = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows,
            )
        kept = self.capture.collect_points() if points else {}
        return out.logits.squeeze(0), self.capture.collect(), kept

    def unfuse_layers(self) -> None:
        """Have the decoder layers run as transformers wrote them."""
        for layer in self.capture.layers:
            layer.__dict__.pop("forward", None)

    def close(self) -> None:
        """Free the weights and the cache, even if a plugin still holds the model."""
        drop_tensors(self.cache)
        self.draft_ranges.clear()  # they refer to this object
        for layer in self._fused_layers:
            layer.close()
        if self._fused_head is not None:
            self._fused_head.close()
        drop_weights(self.model)

    def _load(self, path: str, dtype: torch.dtype | None) -> Any:
        """Return the model. Weights that are to be sharded are cut on the host, whose copy is the
        mapped file; all others go to the device."""
        device = self.device if self.ranks is None else CPU
        with self._startup.part("loading weights"), _progress_of(self._startup):
            model = load_checkpoint(path, dtype, device).eval()
        rowwise = model.dtype is torch.float64 or (
            self.device.type == "cpu" and model.dtype in HALF
        )
        if rowwise and _has_experts(model.config):
            # Grouped products lack float64, and in half precision a group of one row has a kernel
            # of its own.
            model.set_experts_implementation("eager")
        return model

    def _fuse(self, row_invariant: bool) -> None:
        """Replace modules by faster ones that give the same."""
        with self._startup.part("fusing layers"):
            fuse_norms(self.model)
            self.rotary.begin(None)
            layers = self.capture.layers
            if self.kernels is not None:
                self._use_kernels(row_invariant)
            elif self.device.type == "cpu":
                kernels = kernels_in_c(Operation.LAYERS, self.device, self.dtype)
                self._fused_layers = fuse_cpu_layers(self.model, layers, kernels)
                if kernels is not None:
                    self._fused_head = fuse_cpu_head(self.model, kernels)
                if self.row_invariance == "on":
                    pair_rows(self.model)
            shorten_calls(self.model, keep=self.capture.hooked)

    def _use_kernels(self, row_invariant: bool) -> None:
        """Have the modules compute by our kernels. They need Triton, which is not everywhere."""
        from specplug.model.half_precision import replace_modules

        self._fused_layers, variant = replace_modules(
            self.model, self.capture.layers, row_invariant=row_invariant
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

    def _begin_check(self, path: str) -> ModelCheck:
        """Run the model before anything in it is changed."""
        with self._startup.part(_CHECK), self.stepping():
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
        """Compare our passes with the model's own."""
        with self._startup.part(_CHECK), self.stepping():
            check.compare(self._logits, self.cache)

    def _prove_rows(self, check: ModelCheck) -> None:
        """Compare the bits that rows have in different passes. All ranks do, whatever is known."""
        proof = RowProof(
            kv_shape=self.kv_shape,
            dtype=self.dtype,
            device=self.device,
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            kernels=self.kernels,
        )
        with self._startup.part("proving row invariance"), self.stepping():
            found = proof.of_passes(
                self._logits, self.capture.layers, self.cache, self.begin_proved_pass
            )
            found = found or proof.of_attention(check.attentions)
        if self.row_invariance != "on":
            return  # it has been told
        if found is not None:
            self._tell_row_variance(found)
        elif packed := count_packed_modules(self.model):
            told = ", ".join(f"{count} of {name}" for name, count in packed.items())
            self.row_invariance = (
                f"on, but for packed weights ({told}): their products are proved for some numbers "
                "of rows, among them 1, and not for all"
            )

    def _logits(self, token_ids: Tensor, plan: PagedPlan, logits_rows: Tensor | int) -> Tensor:
        return self.forward(token_ids, plan, logits_rows)[0]

    def stepping(self) -> AbstractContextManager[None]:
        """Enclose passes in which the other ranks take part."""
        return nullcontext() if self.ranks is None else self.ranks.stepping()

    def _begin_checked_pass(self, rows: int, lengths: Tensor) -> None:
        """Begin a pass of the check in all ranks, with the rotary frequencies of these lengths."""
        self.begin_proved_pass(rows)
        self.rotary.begin(lengths)

    def begin_proved_pass(self, rows: int) -> None:
        """Begin a pass of the proof in all ranks."""
        if self.ranks is not None:
            self.ranks.agree(rows)


def _set_threads(num_threads: int | None, num_parameters: int) -> None:
    """Set torch's threads on the CPU; None: one for a small model, else torch's own number."""
    if num_threads is None and num_parameters < _SMALL_MODEL:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _progress_of(startup: Startup) -> AbstractContextManager[None]:
    """Report the number of loaded tensors to the start, if it has a listener."""
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


def row_invariance_without_kernels(
    dtype: torch.dtype, device: torch.device, row_invariant: bool
) -> str:
    """Return what ``Target.row_invariance`` says where torch computes all, before it is proved.
    Warn of it on a GPU, where one expects the kernels.

    Args:
        row_invariant: whether it is asked for.
    """
    if dtype not in HALF:
        return f"not needed in {str(dtype).removeprefix('torch.')}"
    if not row_invariant:
        return "off: disable_row_invariance"
    if device.type == "cpu":
        return "on"
    why = f"there are no kernels for this {device.type}"
    if device.type == "cuda":
        why = choose(Operation.LAYERS, device, dtype).why
        warn_fallback(
            f"{why}: torch attends and multiplies, so tokens may depend on what else is in a batch"
        )
    return f"off: {why}"


def _has_experts(config: Any) -> bool:
    """Return whether layers are mixtures of experts, by the configuration."""
    names = "num_experts", "n_routed_experts", "num_local_experts"
    return any(getattr(config.get_text_config(), name, None) for name in names)
