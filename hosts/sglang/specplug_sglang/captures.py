"""The target's hidden states that plugins ask for.

SGLang returns one tensor of hidden states: the states before some layers, concatenated, or what
its LM head reads. An algorithm may need both. The module that returns them is the logits processor,
so what is missing is handed to it with the states before layers: it is then a part of the target's
pass, of a recorded one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specplug import UsageError
from specplug_sglang.sglang_names import part_of

LAYER_INPUTS = "layer_inputs"
LM_HEAD_INPUT = "lm_head_input"


class Captures:
    """The hidden states that an algorithm has asked for, and their columns in SGLang's tensor.

    Args:
        model: SGLang's causal LM.
        num_layers: the number of its layers.
        hidden_size: H.
    """

    def __init__(self, model: nn.Module, num_layers: int, hidden_size: int) -> None:
        self._model: Any = model
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._layers: dict[str, tuple[int, ...]] = {}  # by name
        self._lm_head_input = False
        self._before_norm: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._layers) or self._lm_head_input

    def layer_inputs(self, layer_ids: Sequence[int]) -> str:
        """Ask for the states before these layers, and return their name.

        Raises:
            UsageError: the target has no such layer, or SGLang's model cannot return the states.
        """
        for layer in layer_ids:
            if not 0 <= layer <= self._num_layers:
                raise UsageError(
                    f"capture_layer_inputs: layer {layer}; expected one from 0 to "
                    f"{self._num_layers}, the target's layers"
                )
        if not hasattr(self._model, "set_eagle3_layers_to_capture"):
            raise UsageError(
                f"SGLang's {type(self._model).__name__} returns no hidden states of layers (it has "
                "no set_eagle3_layers_to_capture); use an algorithm that reads none"
            )
        wanted = tuple(layer_ids)
        name = LAYER_INPUTS if not self._layers else f"{LAYER_INPUTS}_{len(self._layers)}"
        self._layers[name] = wanted
        return name

    def lm_head_input(self) -> str:
        """Ask for the states after the final norm, and return their name."""
        self._lm_head_input = True
        return LM_HEAD_INPUT

    @property
    def _inner(self) -> list[int]:
        """The layers whose inputs SGLang's model returns, in its order."""
        asked = {layer for layers in self._layers.values() for layer in layers}
        return sorted(asked - {self._num_layers})

    def install(self) -> None:
        """Have the model return the states. Called once, after ``create_worker``."""
        if self._inner:
            # SGLang counts the outputs of layers, we their inputs.
            self._model.set_eagle3_layers_to_capture([layer - 1 for layer in self._inner])
        if self._after_layers:
            norm = part_of(self._model, "model.norm")
            norm.register_forward_pre_hook(self._keep_before_norm)
        if self._after_layers or (self._lm_head_input and self._inner):
            processor = part_of(self._model, "logits_processor")
            processor.register_forward_pre_hook(self._hand_over, with_kwargs=True)

    @property
    def _after_layers(self) -> bool:
        """Whether the output of the last layer is asked for."""
        return any(self._num_layers in layers for layers in self._layers.values())

    def _keep_before_norm(self, norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden, *residual = arguments
        with_residual = residual and isinstance(residual[0], Tensor)
        self._before_norm = hidden + residual[0] if with_residual else hidden.clone()

    def _hand_over(
        self, processor: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the states that SGLang does not return to those that it returns."""
        input_ids, hidden, lm_head, metadata, *rest = arguments
        given = rest.pop(0) if rest else named.pop("aux_hidden_states", None)
        states = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
        if self._after_layers:
            assert self._before_norm is not None
            states.append(self._before_norm)
            self._before_norm = None
        if self._lm_head_input:
            states.append(hidden)
        return (input_ids, hidden, lm_head, metadata, states, *rest), named

    def of(self, hidden_states: Tensor | None) -> dict[str, Tensor]:
        """Return the states by name, each [R, layers * H].

        Args:
            hidden_states: [R, K * H], SGLang's tensor of a pass.
        """
        if not self:
            return {}
        assert hidden_states is not None
        order = [*self._inner, *([self._num_layers] if self._after_layers else [])]
        place = {layer: i for i, layer in enumerate(order)}
        columns = hidden_states.view(len(hidden_states), -1, self._hidden_size)
        found = {}
        for name, layers in self._layers.items():
            places = [place[layer] for layer in layers]
            first = places[0]
            if places == list(range(first, first + len(places))):
                found[name] = columns[:, first : first + len(places)].flatten(1)
            else:
                found[name] = torch.cat([columns[:, p] for p in places], dim=1)
        if self._lm_head_input:
            found[LM_HEAD_INPUT] = columns[:, -1]
        return found
