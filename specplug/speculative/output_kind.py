"""What a request can get for each of its tokens, besides the token: a row of the engine's table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import PluginError, shown
from specplug.sampling_params import SamplingParams
from specplug.speculative.draft import described, is_dense

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Types of tensors that go from one instance to another, and so of outputs."""

TensorSpec = tuple[tuple[int | None, ...], torch.dtype]
"""Shape of one token's tensor (None: any size) and its type."""


class OutputKind(ABC):
    """One kind of value that the engine hands out for each token of the requests that ask for it.

    The engine keeps the values over chunks and over a retraction, computes again what the prefix
    cache has no values of, and sends them along with a prefill of another instance. It does so for
    every kind alike, and does nothing in a step in which no request asks.

    Attributes:
        name: unique in a run. Of its tensors in ``TargetOutput.per_node`` one has this name.
        every_position: True: there is a value for each token that the target has read, which is
            each of the prompt and the output but the last. False: one for each generated token.
        is_sampled: whether it follows from logits and the token chosen there (``sample``), so that
            a prefill has it at the last row of each chunk alone; else the pass itself gives it.
        has_own_field: whether ``RequestOutput`` has a field of its name.
        streams: whether it is handed out while the request runs, as a tuple of ``entries``; else
            it is a tensor [tokens, …], at the end.
        tensor_names: of its further tensors, which no other output may be called.
    """

    name: str
    every_position: bool = False
    is_sampled: bool = False
    has_own_field: bool = False
    streams: bool = False
    tensor_names: tuple[str, ...] = ()

    @abstractmethod
    def asked(self, params: SamplingParams) -> Any:
        """Return what a request wants of it; None: nothing.

        Raises:
            UsageError: this target cannot give that.
        """

    @abstractmethod
    def tensor_specs(self, want: Any) -> Mapping[str, TensorSpec]:
        """Return its tensors by name, as a request that wants this keeps them for each token."""

    def points(self, want: Any) -> tuple[Hashable, ...]:
        """Return where the target's pass is read: a column [R, …] of its tensor each; () if
        nowhere."""
        return ()

    def sample(self, logits: Tensor, predict: Tensor, wants: Sequence[Any]) -> dict[str, Tensor]:
        """Return its tensors by name, [M, …], for logits [M, V] and the token chosen from each row
        [M].

        Args:
            wants: of the requests in the batch that ask.
        """
        raise NotImplementedError

    def found_in(
        self, per_node: Mapping[str, Tensor], want: Any, num_rows: int
    ) -> dict[str, Tensor]:
        """Return its tensors [rows, …] among the outputs of a pass.

        Args:
            want: of any request that asks.
            num_rows: of the pass; a tensor that is sampled in a prefill has fewer.
        """
        return {name: per_node[name] for name in self.tensor_specs(want)}

    def cut(self, want: Any, tensor: Tensor) -> Tensor:
        """Return the part of a batch's tensor [rows, …] that a request which wants this gets."""
        return tensor

    def entries(self, want: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
        """Return the values of some tokens, one each, if it ``streams``."""
        raise NotImplementedError

    def is_sound(self, tensors: Mapping[str, Tensor], first_token: int) -> bool:
        """Return whether tensors that another instance has sent with a prefill, and that have their
        ``tensor_specs``, can be those of a request whose first token is this."""
        return True


@attrs.frozen(kw_only=True, eq=False)
class PerTokenOutput(OutputKind):
    """An output that a plugin or an extension adds, by ``runtime.add_output`` in ``create_worker``.

    A request asks for it by ``SamplingParams(token_outputs=(name,))``, and finds it in
    ``RequestOutput.token_outputs[name]`` when it has ended: a CPU tensor [tokens, *shape], or None
    if it ended in its prefill. Nothing is computed in a step in which no request asks.

    Attributes:
        name: unique in a run.
        shape: of one token's value; () is a number.
        dtype: of it.
        every_position: True: there is a value for each token of the prompt and the output but the
            last, which the target never reads; the prefix cache spares no computing then. False:
            there is one for each generated token.
        compute: ``compute(logits [M, V], predict [M] int64) -> [M, *shape]``, from the logits as
            they leave the target and the token that was chosen from each row; both are copies. For
            generated tokens alone. None: the value of a row is that in
            ``TargetOutput.per_node[name]`` [T, *shape], which ``runtime.capture_layer_inputs``,
            ``runtime.capture_lm_head_input`` or a ``verify`` hook has left there. A row's value is
            the value of its own token if ``every_position``, else of the token after it.
        fill: the value where ``per_node`` has none. There is no ``verify`` in a prefill, which
            gives the first token.

    Raises:
        PluginError: there is ``compute`` for every position.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    every_position: bool = False
    compute: Callable[[Tensor, Tensor], Tensor] | None = None
    fill: float = 0.0
    is_sampled: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._check_form()
        object.__setattr__(self, "is_sampled", self.compute is not None)
        if self.is_sampled and self.every_position:
            raise PluginError(
                f"output {self.name!r} has compute and every_position; expected one of them, as a "
                "prompt has logits at its last token alone; leave one out"
            )

    def _check_form(self) -> None:
        """Refuse what no request could be given.

        Raises:
            PluginError: a field has another type, or ``dtype`` does not hold ``fill``.
        """
        sizes = self.shape if isinstance(self.shape, tuple) else (None,)
        sound = {
            "name": (isinstance(self.name, str) and self.name != "", "a name"),
            "shape": (all(type(n) is int and n >= 0 for n in sizes), "a tuple of sizes"),
            "dtype": (self.dtype in DTYPES, f"one of {', '.join(map(str, DTYPES))}"),
            "compute": (self.compute is None or callable(self.compute), "a function or None"),
            "every_position": (type(self.every_position) is bool, "True or False"),
        }
        for field, (is_sound, expected) in sound.items():
            if not is_sound:
                raise PluginError(
                    f"PerTokenOutput: {field}={shown(getattr(self, field))}; expected {expected}; "
                    "fix the plugin"
                )
        try:
            torch.full((), self.fill, dtype=self.dtype)
        except Exception as error:
            raise PluginError(
                f"output {self.name!r}: fill={shown(self.fill)}; expected a number that "
                f"{self.dtype} holds; fix the plugin"
            ) from error

    def asked(self, params: SamplingParams) -> bool | None:
        """Return True, or None."""
        return self.name in params.token_outputs or None

    def tensor_specs(self, want: bool) -> Mapping[str, TensorSpec]:
        """Return the spec of its one tensor."""
        return {self.name: (self.shape, self.dtype)}

    def sample(self, logits: Tensor, predict: Tensor, wants: Sequence[bool]) -> dict[str, Tensor]:
        """Return what ``compute`` gives.

        Raises:
            PluginError: it fails, or gives something else.
        """
        found = self._compute(logits.clone(), predict.clone())  # others read them too
        self._check(found, len(predict), logits.device)
        return {self.name: found}

    def _compute(self, logits: Tensor, predict: Tensor) -> Tensor:
        assert self.compute is not None
        return self.compute(logits, predict)

    def found_in(
        self, per_node: Mapping[str, Tensor], want: bool, num_rows: int
    ) -> dict[str, Tensor]:
        """Return the tensor, or as many times ``fill``.

        Raises:
            PluginError: it has another form.
        """
        found = per_node.get(self.name)
        if found is None:
            found = torch.full((num_rows, *self.shape), self.fill, dtype=self.dtype)
        elif not self.is_sampled:
            self._check(found, num_rows)
        return {self.name: found}

    @property
    def _subject(self) -> str:
        """The output, as messages name it."""
        return f"output {self.name!r}"

    def _check(self, found: object, num_rows: int, device: torch.device | None = None) -> None:
        expected = (num_rows, *self.shape)
        if (
            not is_dense(found)
            or found.shape != expected
            or found.dtype != self.dtype
            or (device is not None and found.device != device)
        ):
            where = "" if device is None else f" on {device}"
            raise PluginError(
                f"{self._subject} is {described(found)}; expected {list(expected)} of "
                f"{self.dtype}{where}; fix the plugin"
            )


@attrs.frozen(kw_only=True, eq=False)
class AddedOutput(PerTokenOutput):
    """A plugin's output as a run has it. Its values are taken and not its methods, as it may be of
    a subclass; its errors bear the plugin's name.

    Attributes:
        plugin: that has added it, as messages name it.
        guard: ``guard(what, function, *arguments)`` calls code of that plugin.
    """

    plugin: str
    guard: Callable[..., Any]

    @classmethod
    def of(cls, output: PerTokenOutput, plugin: str, guard: Callable[..., Any]) -> AddedOutput:
        """Take the values of what a plugin adds."""
        names = [field.name for field in attrs.fields(PerTokenOutput) if field.init]
        values = {name: getattr(output, name) for name in names}
        return cls(**values, plugin=plugin, guard=guard)

    def _compute(self, logits: Tensor, predict: Tensor) -> Tensor:
        what = f"output {self.name!r}: compute"
        found: Tensor = self.guard(what, self.compute, logits, predict)
        return found

    @property
    def _subject(self) -> str:
        return f"{self.plugin}: output {self.name!r}"
