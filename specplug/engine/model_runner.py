"""The target: any causal LM of transformers, run over our paged KV cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from specplug.engine.attention import (
    IMPLEMENTATION,
    TARGET_PASS,
    JoinedPlan,
    PagedPlan,
    TargetPass,
    register,
)
from specplug.engine.captures import Captures
from specplug.engine.fingerprint import weights_fingerprint
from specplug.engine.foreign_code import DATA_ONLY, refuse_code
from specplug.engine.graph_runner import GraphRunner
from specplug.engine.kv_cache import KVShape, drop_tensors
from specplug.engine.lean_modules import fuse_norms, pack_weights, shorten_calls
from specplug.engine.rank_group import RankGroup
from specplug.engine.rotary import RotaryByLength
from specplug.engine.sharded_mlp import shard_mlps
from specplug.errors import CheckpointError
from specplug.spec.runtime import KVCache


class ModelRunner:
    """Loads the target and runs passes over flattened tokens.

    Args:
        path: folder or hub id.
        dtype: of weights and activations; None: what the checkpoint says.
        device: where it runs.
        ranks: over which its MLPs are sharded; None: it is whole.
        identified: whether ``fingerprint`` is wanted.

    Attributes:
        fingerprint: of its weights, whole and as they were loaded; None if nobody wanted it.

    Raises:
        CheckpointError: there is no such model, or transformers cannot load it.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype | None,
        device: torch.device,
        ranks: RankGroup | None = None,
        *,
        identified: bool = False,
    ) -> None:
        self.device = device
        self.model = _load(path, dtype).eval()
        _check_attention(path, self.model)
        if self.model.dtype is torch.float64 and _has_experts(self.model.config):
            self.model.set_experts_implementation("eager")  # grouped products know no float64
        self.fingerprint = weights_fingerprint(self.model) if identified else None
        self._ranks = ranks
        if ranks is not None:
            shard_mlps(self.model, ranks)
        self.rotary = RotaryByLength(self.model)
        self.model.to(device)
        fuse_norms(self.model)
        if device.type == "cpu":
            pack_weights(self.model)
        self.captures = Captures(self.model)
        shorten_calls(self.model, keep=self.captures.hooked)
        self.dtype: torch.dtype = self.model.dtype
        config = self.model.config.get_text_config()
        self.config: Any = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.context_len: int = self.rotary.context_len
        heads: int = config.num_attention_heads
        self.kv_shape = KVShape(
            self.num_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            # Latent attention (DeepSeek) calls the rotated part alone ``head_dim``.
            getattr(config, "qk_head_dim", None)
            or getattr(config, "head_dim", None)
            or self.hidden_size // heads,
        )
        self.cache = KVCache([], [])
        self._graphs: dict[bool, GraphRunner] = {}

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
    def num_parameters(self) -> int:
        """Of the target, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def record_graphs(self) -> None:
        """Replay ``verify``'s passes as CUDA graphs from now on."""
        self._graphs = {
            wanted: GraphRunner(partial(self._forward, logits_rows=0, routed_experts=wanted))
            for wanted in (False, True)
        }

    @property
    def graph_failure(self) -> str | None:
        """Why passes are not recorded, if that was tried and failed."""
        return next((g.failure for g in self._graphs.values() if g.failure is not None), None)

    def prefill(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor,
        routed_experts: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A pass over prompt tokens, and in a mixed step over the nodes of drafts behind them.

        Args:
            token_ids: [R] int64.
            plan: where they stand and what they see.
            logits_rows: [M] int64 rows whose logits are wanted.
            routed_experts: whether each row's experts are wanted.

        Returns:
            Logits [M, V], and the captured outputs by name, leading size R.
        """
        return self._forward(token_ids, plan, logits_rows, routed_experts)

    def verify(
        self, token_ids: Tensor, plan: PagedPlan, routed_experts: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A pass over the nodes of a draft: as ``prefill``, with the logits of all rows."""
        if not self._graphs:
            return self._forward(token_ids, plan, 0, routed_experts)
        outputs: tuple[Tensor, dict[str, Tensor]] = self._graphs[routed_experts](token_ids, plan)
        return outputs

    def close(self) -> None:
        """Free the weights, the graphs and the cache, whoever still holds the model."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        drop_tensors(self.cache)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.new_empty(0)

    def _forward(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        routed_experts: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.captures.begin()
        self.rotary.begin(plan.lengths)
        if self._ranks is not None:
            self.captures.routed_rows = self._ranks.own
        running = TARGET_PASS.set(TargetPass(plan, self.cache))
        try:
            out = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows,
            )
        finally:
            TARGET_PASS.reset(running)
        return out.logits.squeeze(0), self.captures.collect(routed_experts)


def _load(path: str, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register()
    check_model_path(path)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            attn_implementation=IMPLEMENTATION,
            weights_only=True,
            **DATA_ONLY,
        )
    except UnpicklingError as error:
        raise CheckpointError(
            f"model {path!r} cannot be loaded: its weights are a pickle with more than tensors in "
            "it; expected *.safetensors, or a pickle of tensors alone"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        refuse_code(f"model {path!r}", error)
        raise CheckpointError(f"model {path!r} cannot be loaded: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_attention(path: str, model: Any) -> None:
    """Refuse a model whose attention is not ours to compute: it would run, and be wrong."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange or not model._supports_attention_backend:
        what = ", ".join(strange) or "attention of its own"
        raise CheckpointError(
            f"model {path!r} ({type(model).__name__}) has {what}; expected full or sliding-window "
            "attention through transformers' AttentionInterface: choose another model"
        )


def check_model_path(path: str) -> None:
    """Refuse what can only be a folder, and is none.

    Raises:
        CheckpointError: it looks like a path and there is no such folder, or no ``config.json``.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"model {path!r}: the folder has no config.json")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"model {path!r}: no such folder; expected the folder of a transformers checkpoint, "
            "a hub id (organisation/name), or nothing for the default model"
        )


def _has_experts(config: Any) -> bool:
    """Whether layers are mixtures of experts, as configurations name their number."""
    names = "num_experts", "n_routed_experts", "num_local_experts"
    return any(getattr(config.get_text_config(), name, None) for name in names)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
