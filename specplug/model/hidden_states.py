"""What the target puts out beside its logits, kept by hooks while a pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug.errors import CheckpointError, UsageError

AUX_HIDDEN_STATES = "aux_hidden_states"
LM_HEAD_INPUT = "lm_head_input"
ROUTED_EXPERTS = "routed_experts"


@attrs.define(eq=False)
class _Kept:
    """What the hooks have kept of a pass: all that they know, so no module refers to itself.

    Attributes:
        layer_inputs: [1, R, H] by layer; the number of layers: what leaves the last one.
        lm_head_input: [1, R, H], or None.
        experts: [R, experts a token] int64, a router each.
    """

    layer_inputs: dict[int, Tensor] = attrs.field(factory=dict)
    lm_head_input: Tensor | None = None
    experts: list[Tensor] = attrs.field(factory=list)

    def layer_input(self, layer_id: int) -> Callable[..., None]:
        """A hook before the layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.layer_inputs[layer_id] = args[0] if args else kwargs["hidden_states"]

        return hook

    def last_output(self, num_layers: int) -> Callable[..., None]:
        """A hook behind the last layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.layer_inputs[num_layers] = output[0] if isinstance(output, tuple) else output

        return hook

    def decoder_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook behind the decoder."""
        self.lm_head_input = output[0]  # transformers' outputs begin with the hidden states

    def routing(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook behind a router."""
        self.experts.append(next(t for t in output if not t.is_floating_point()))


class HiddenStateCapture:
    """Hooks on a transformers model.

    Args:
        model: a causal LM.

    Raises:
        CheckpointError: it has no list of layers.

    Attributes:
        routed_rows: the pass's own among the rows that the routers see.
    """

    def __init__(self, model: Any) -> None:
        self._decoder = _decoder(model)
        self.layers = _layers(self._decoder, type(model).__name__)
        self._routers = _routers(model)
        self._layer_ids: tuple[int, ...] = ()
        self._kept = _Kept()
        self.routed_rows = slice(None)
        for router in self._routers:
            router.register_forward_hook(self._kept.routing)

    @property
    def hooked(self) -> tuple[nn.Module, ...]:
        """The modules that hooks may be on: all others may be called without looking for any."""
        return (self._decoder, *self.layers, *self._routers)

    @property
    def num_routers(self) -> int:
        """Layers that route their tokens to experts; 0 for a dense model."""
        return len(self._routers)

    def keep_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        """Keep the hidden states before these decoder layers on every pass; the number of layers
        stands for those behind the last one.

        Raises:
            UsageError: there is no such layer.
        """
        last = len(self.layers)
        for layer_id in layer_ids:
            if not 0 <= layer_id <= last:
                raise UsageError(
                    f"layer {layer_id} of the target: it has layers 0 to {last - 1}; "
                    "the draft model was made for another target"
                )
            if layer_id == last:
                self.layers[-1].register_forward_hook(self._kept.last_output(last))
            else:
                keep = self._kept.layer_input(layer_id)
                self.layers[layer_id].register_forward_pre_hook(keep, with_kwargs=True)
        self._layer_ids = layer_ids
        return AUX_HIDDEN_STATES

    def keep_lm_head_input(self) -> str:
        """Keep what leaves the final norm on every pass."""
        self._decoder.register_forward_hook(self._kept.decoder_output)
        return LM_HEAD_INPUT

    def begin(self) -> None:
        """A pass begins; what a pass that did not end has left is forgotten."""
        self._kept.experts.clear()

    def collect(self, routed_experts: bool) -> dict[str, Tensor]:
        """What the last pass left, by name, leading size R.

        Args:
            routed_experts: give ``routed_experts`` too: [R, routers, experts a token] int64, the
                experts that each token was routed to, layer by layer.
        """
        kept = {}
        if self._layer_ids:
            states = [self._kept.layer_inputs[i].squeeze(0) for i in self._layer_ids]
            kept[AUX_HIDDEN_STATES] = torch.cat(states, dim=-1)
        if self._kept.lm_head_input is not None:
            kept[LM_HEAD_INPUT] = self._kept.lm_head_input.squeeze(0)
        if routed_experts:
            kept[ROUTED_EXPERTS] = torch.stack(self._kept.experts, dim=1)[self.routed_rows]
        return kept


def _decoder(model: Any) -> nn.Module:
    """What has the layers. Some models call their output head so (ModernBERT)."""
    decoder: nn.Module = model.get_decoder()
    base: nn.Module = model.base_model
    return base if isinstance(decoder, nn.Linear) else decoder


def _layers(decoder: nn.Module, name: str) -> nn.ModuleList:
    """Models name their layers ``layers``, ``h``, … or have them in an ``encoder``."""
    for modules in (decoder.children(), decoder.modules()):
        for module in modules:
            if isinstance(module, nn.ModuleList):
                return module
    raise CheckpointError(
        f"{name}: it has no list of layers; expected a decoder of transformers: choose another "
        "model"
    )


def _routers(model: Any) -> list[nn.Module]:
    """The routers of a mixture of experts, in the order of their layers.

    transformers says which class records ``router_logits``; only those that also put out which
    experts they chose are of use.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    cls = getattr(recorder, "target_class", None)
    found = [] if cls is None else [m for m in model.modules() if isinstance(m, cls)]
    size = model.config.get_text_config().hidden_size
    row = torch.zeros(1, size, dtype=model.dtype, device=model.device)
    return found if all(_tells_experts(router, row) for router in found) else []


@torch.inference_mode()
def _tells_experts(router: nn.Module, row: Tensor) -> bool:
    """Whether a router's output holds the numbers of the experts of each row."""
    try:
        output = router(row)
    except Exception:  # whatever it takes, it is not rows of hidden states
        return False
    experts = [t for t in output if not t.is_floating_point()] if type(output) is tuple else []
    return len(experts) == 1 and experts[0].dim() == 2 and experts[0].shape[0] == 1
