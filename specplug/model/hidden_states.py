"""Hidden states and routed experts of the target, captured by hooks while a pass runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specplug.errors import CheckpointError, UsageError

AUX_HIDDEN_STATES = "aux_hidden_states"
LM_HEAD_INPUT = "lm_head_input"

HIDDEN_STATES = "hidden_states"
ROUTED_EXPERTS = "routed_experts"


class Point(NamedTuple):
    """A place in the target where a pass can be read.

    Attributes:
        kind: ``HIDDEN_STATES``: [R, H] before layer ``number``; the number of layers: what the LM
            head reads, after the final norm (as transformers numbers its ``hidden_states``).
            ``ROUTED_EXPERTS``: [R, experts per token] int64 of router ``number``.
        number: which of that kind.
    """

    kind: str
    number: int


class HiddenStateCapture:
    """Hooks on a transformers model, which keep what its modules read or give during a pass.

    What an algorithm asks for when the run begins is kept on every pass. What requests ask for is
    kept on the passes that are given its points; the other passes have no hook for it.

    Args:
        model: a causal LM.

    Raises:
        CheckpointError: it has no list of layers.

    Attributes:
        decoder: the module that has the layers.
        layers: the decoder layers.
        routed_rows: the pass's own among the rows that the routers see.
    """

    def __init__(self, model: Any) -> None:
        self.decoder = _decoder(model)
        self.layers = _layers(self.decoder, type(model).__name__)
        self._routers = _routers(model)
        self._layer_ids: dict[str, tuple[int, ...]] = {}
        self._keeps_lm_head_input = False
        self._kept: dict[Hashable, Tensor] = {}
        self._points: tuple[Point, ...] = ()
        self._handles: list[RemovableHandle] = []
        self.routed_rows = slice(None)

    @property
    def hooked(self) -> tuple[nn.Module, ...]:
        """The modules that hooks may be on: all others may be called without looking for any."""
        return (self.decoder, *self.layers, *self._routers)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers whose inputs are kept on every pass."""
        return tuple(i for ids in self._layer_ids.values() for i in ids)

    @property
    def num_routers(self) -> int:
        """Layers that route their tokens to experts; 0 for a dense model."""
        return len(self._routers)

    def points(self, kinds: Collection[str]) -> tuple[Point, ...]:
        """Return all points of these kinds."""
        sizes = {HIDDEN_STATES: len(self.layers) + 1, ROUTED_EXPERTS: len(self._routers)}
        return tuple(Point(kind, i) for kind in sizes if kind in kinds for i in range(sizes[kind]))

    def keep_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        """Keep the hidden states before these decoder layers on every pass; the number of layers
        stands for those after the last one, before the final norm.

        Returns:
            Their name: another one for each other choice of layers.

        Raises:
            UsageError: there is no such layer.
        """
        for name, kept in self._layer_ids.items():
            if kept == layer_ids:
                return name
        last, known = len(self.layers), {i for ids in self._layer_ids.values() for i in ids}
        for layer_id in dict.fromkeys(layer_ids):
            if not 0 <= layer_id <= last:
                raise UsageError(
                    f"layer {layer_id} of the target: it has layers 0 to {last - 1}; "
                    "the draft model was made for another target"
                )
            if layer_id in known:
                continue
            key = AUX_HIDDEN_STATES, layer_id
            if layer_id == last:
                self.layers[-1].register_forward_hook(_keep_output(self._kept, key))
            else:
                hook = _keep_input(self._kept, key)
                self.layers[layer_id].register_forward_pre_hook(hook, with_kwargs=True)
        number = len(self._layer_ids)
        name = f"{AUX_HIDDEN_STATES}_{number + 1}" if number else AUX_HIDDEN_STATES
        self._layer_ids[name] = layer_ids
        return name

    def keep_lm_head_input(self) -> str:
        """Keep what leaves the final norm on every pass."""
        if not self._keeps_lm_head_input:
            self.decoder.register_forward_hook(_keep_output(self._kept, LM_HEAD_INPUT))
        self._keeps_lm_head_input = True
        return LM_HEAD_INPUT

    def begin(self, points: tuple[Point, ...]) -> None:
        """Begin a pass that is to be read at these points."""
        if points != self._points:
            for point, handle in zip(self._points, self._handles, strict=True):
                handle.remove()
                self._kept.pop(point, None)  # of a pass that has failed
            self._handles = [self._hook(point) for point in points]
            self._points = points

    def _hook(self, point: Point) -> RemovableHandle:
        if point.kind == ROUTED_EXPERTS:
            router = self._routers[point.number]
            return router.register_forward_hook(_keep_experts(self._kept, point))
        if point.number == len(self.layers):
            return self.decoder.register_forward_hook(_keep_output(self._kept, point))
        hook = _keep_input(self._kept, point)
        return self.layers[point.number].register_forward_pre_hook(hook, with_kwargs=True)

    def collect(self) -> dict[str, Tensor]:
        """Return what algorithms have asked for, of the last pass, by name, leading size R."""
        kept, found = self._kept, {}
        for name, layer_ids in self._layer_ids.items():
            if not layer_ids:
                continue
            states = [kept[AUX_HIDDEN_STATES, i].squeeze(0) for i in layer_ids]
            found[name] = torch.cat(states, dim=-1)
        if self._keeps_lm_head_input:
            found[LM_HEAD_INPUT] = kept[LM_HEAD_INPUT].squeeze(0)
        return found

    def collect_points(self) -> dict[Hashable, Tensor]:
        """Return what stood at the points of the last pass, leading size R."""
        return {point: self._read(point, self._kept.pop(point)) for point in self._points}

    def _read(self, point: Point, tensor: Tensor) -> Tensor:
        return tensor[self.routed_rows] if point.kind == ROUTED_EXPERTS else tensor.squeeze(0)


# Hooks know the dictionary that they write to, and no module: a module that referred to itself
# would wait for the garbage collector.


def _keep_input(kept: dict[Hashable, Tensor], key: Hashable) -> Callable[..., None]:
    """Return a hook before a layer."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[key] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(kept: dict[Hashable, Tensor], key: Hashable) -> Callable[..., None]:
    """Return a hook after a layer or the decoder, whose outputs begin with the hidden states."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kept[key] = output if isinstance(output, Tensor) else output[0]

    return hook


def _keep_experts(kept: dict[Hashable, Tensor], key: Hashable) -> Callable[..., None]:
    """Return a hook after a router."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kept[key] = next(t for t in output if not t.is_floating_point())

    return hook


def _decoder(model: Any) -> nn.Module:
    """Return the module that has the layers. Some models call their output head the decoder
    (ModernBERT)."""
    decoder: nn.Module = model.get_decoder()
    base: nn.Module = model.base_model
    return base if isinstance(decoder, nn.Linear) else decoder


def _layers(decoder: nn.Module, name: str) -> nn.ModuleList:
    """Return the layers, which models name ``layers``, ``h``, … or have them in an ``encoder``."""
    for modules in (decoder.children(), decoder.modules()):
        for module in modules:
            if isinstance(module, nn.ModuleList):
                return module
    raise CheckpointError(
        f"{name}: it has no list of layers; expected a decoder of transformers: choose another "
        "model"
    )


def _routers(model: Any) -> list[nn.Module]:
    """Return the routers of a mixture of experts, in the order of their layers.

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
    """Return whether a router's output holds the numbers of the experts of each row."""
    try:
        output = router(row)
    except Exception:  # whatever it takes, it is not rows of hidden states
        return False
    experts = [t for t in output if not t.is_floating_point()] if type(output) is tuple else []
    return len(experts) == 1 and experts[0].dim() == 2 and experts[0].shape[0] == 1
