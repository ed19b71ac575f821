"""Where two runs of one prompt part: token, step, and the layer and row that first differ.

torch is imported when a run is watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from specplug.llm import LLM
    from specplug.outputs import RequestOutput
    from specplug.sampling_params import SamplingParams

MOST_LOGPROBS = 64
"""Most likely tokens whose log-probabilities are compared at each position."""

NEAR_TIES = {"float64": 1e-6, "float32": 1e-3, "float16": 0.03125, "bfloat16": 0.25}
"""By dtype, the gap of two logits that another order of summation may close: in half precision two
steps of a logit from 16 to 32; in the others far more than sums of some thousand terms lose."""

ROUNDING = {"float64": 1e-9, "float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
"""By dtype, how far a row of hidden states may be from another, relative to its greatest value,
for no other reason than the order of summation."""


@attrs.frozen
class Place:
    """The row of a pass that read a token.

    Attributes:
        kind: "prefill" or "decode".
        step: of its kind, from 1 on, for this request: a chunk of its prompt, or a decode step.
        row: in the chunk; or, in a decode step, on the accepted path: 0 is the root.
    """

    kind: str
    step: int
    row: int

    @classmethod
    def of(cls, output: RequestOutput, position: int, chunk: int | None) -> Place:
        """Return the place of the token at a position of prompt and output.

        Args:
            output: of a request that ran alone.
            chunk: most tokens of a prefill step.
        """
        num_prompt = len(output.prompt_token_ids)
        if position < num_prompt:
            size, row = chunk or num_prompt, position - output.num_cached_tokens
            return cls("prefill", row // size + 1, row % size)
        ends = [num_prompt + n for n in accumulate(output.accept_lens)]
        step = sum(end <= position for end in ends)
        return cls("decode", step + 1, position - ([num_prompt, *ends])[step])

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"chunk {self.step} of the prompt, row {self.row}"
        return f"decode step {self.step}, row {self.row} of the accepted path"


@attrs.frozen
class Difference:
    """Rows of hidden states, at one position and layer, that differ.

    Attributes:
        position: of the token that was read.
        layer: the decoder layer whose output differs; -1: the embedding. The last layer stands
            for the output of the final norm, too.
        place: where the run computed the row.
        largest: greatest absolute difference in the row.
        scale: greatest absolute value in the reference's row.
    """

    position: int
    layer: int
    place: Place
    largest: float
    scale: float


@attrs.frozen
class TokenScore:
    """A token at the place where two runs part.

    Attributes:
        token_id: None: the run ended before.
        text: None without a tokenizer.
        reference: its log-probability in the reference; None: it is not among the likely ones.
        run: the same in the run that is wrong.
    """

    token_id: int | None
    text: str | None
    reference: float | None
    run: float | None


@attrs.frozen
class Parting:
    """Where two runs part.

    Attributes:
        is_seen: whether the watched runs part as well. They have their hidden states kept, so that
            they compute the prompt whole and do not replay what follows a pass. If they do not
            part, the fault is in that; the run's log-probabilities and hidden states are unknown.
        position: of the first wrong token, counted from the start of the prompt.
        index: the same, counted from the start of the output.
        place: the row that chose it.
        expected: the reference's token.
        found: the run's.
        reference_gap: in the reference, the logit of ``expected`` less that of ``found``. None: one
            is not among the likely ones. With a temperature: of the scores, noise included.
        run_gap: in the run, the logit of ``found`` less that of ``expected``.
        is_near_tie: whether ``reference_gap`` is one that rounding may close.
        num_rows: positions whose hidden states were compared: those before the wrong token.
        first: the first difference of any bit: the lowest position, there the lowest layer.
        first_beyond_rounding: the first that is larger than rounding makes it.
        largest: the largest, relative to its row.
    """

    is_seen: bool
    position: int
    index: int
    place: Place
    expected: TokenScore
    found: TokenScore
    reference_gap: float | None = None
    run_gap: float | None = None
    is_near_tie: bool | None = None
    num_rows: int = 0
    first: Difference | None = None
    first_beyond_rounding: Difference | None = None
    largest: Difference | None = None


@attrs.frozen
class Watched:
    """A run whose hidden states and log-probabilities are kept.

    Attributes:
        output: ``hidden_states`` [tokens - 1, layers + 1, H], ``logprobs`` of the likely tokens.
        chunk: most tokens of a prefill step.
        dtype: of the target.
        params: of the request.
    """

    output: RequestOutput
    chunk: int | None
    dtype: str
    params: SamplingParams


def watch(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams, *, rounds: int = 1
) -> Watched:
    """Complete a prompt and keep what all layers give.

    Args:
        rounds: how often it is completed; the last one is watched.
    """
    asked: Any = prompt
    for _ in range(rounds - 1):
        llm.generate(asked, params)
    target = llm.engine.steps.runner.target
    kept = attrs.evolve(
        params,
        return_hidden_states=tuple(range(len(target.capture.layers) + 1)),
        logprobs=min(target.vocab_size, MOST_LOGPROBS),
    )
    output = llm.generate(asked, kept)[0]
    dtype = llm.effective_config["dtype"]
    return Watched(output, llm.config.chunked_prefill_size, dtype, params)


def parting_of(reference: Watched, run: Watched, unwatched: RequestOutput) -> Parting:
    """Say where two runs part.

    Args:
        reference: plain decoding.
        run: the one that is wrong.
        unwatched: its output when it was not watched, whose tokens differ from the reference's.
    """
    right, wrong = reference.output, run.output
    is_seen = right.token_ids != wrong.token_ids
    wrong = wrong if is_seen else unwatched
    index = _first_difference(right.token_ids, wrong.token_ids)
    position = len(right.prompt_token_ids) + index
    expected, found = (_score(right, wrong, index, of) for of in (right, wrong))
    gap = _gap(reference, position, expected, found, in_run=False)
    parting = Parting(
        is_seen=is_seen,
        position=position,
        index=index,
        place=Place.of(wrong, position - 1, run.chunk),
        expected=expected,
        found=found,
        reference_gap=gap,
        run_gap=_gap(reference, position, found, expected, in_run=True),
        is_near_tie=None if gap is None else gap <= NEAR_TIES[reference.dtype],
    )
    return attrs.evolve(parting, **_differences(reference, run, position)) if is_seen else parting


def _first_difference(right: Sequence[int], wrong: Sequence[int]) -> int:
    """Return the first index at which they differ; where one goes on, the end of the other."""
    pairs = enumerate(zip(right, wrong, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(right), len(wrong)))


def _score(right: RequestOutput, wrong: RequestOutput, index: int, of: RequestOutput) -> TokenScore:
    """Return the token of one of the outputs at an index, and what both thought of it."""
    if index >= len(of.token_ids):
        return TokenScore(None, None, None, None)
    token = of.token_ids[index]
    kept = [output.logprobs or () for output in (right, wrong)]
    found = [each[index].get(token) if index < len(each) else None for each in kept]
    text = next((each.decoded_token for each in found if each is not None), None)
    scores = [None if each is None else each.logprob for each in found]
    return TokenScore(token, text, *scores)


def _gap(
    watched: Watched, position: int, more: TokenScore, less: TokenScore, *, in_run: bool
) -> float | None:
    """Return by how much one token's score is above another's: as logits, their log-probabilities
    have the same offset."""
    a, b = (each.run if in_run else each.reference for each in (more, less))
    if a is None or b is None or more.token_id is None or less.token_id is None:
        return None
    params = watched.params
    if params.temperature == 0:
        return a - b
    import torch

    from specplug.speculative.noise import gumbel

    noise = gumbel(
        torch.tensor([params.seed or 0]),
        torch.tensor([position]),
        torch.tensor([more.token_id, less.token_id]),
    )
    first, second = noise[0].tolist()
    return float((a - b) / params.temperature + first - second)


def _differences(reference: Watched, run: Watched, position: int) -> Mapping[str, Any]:
    """Compare the rows before a position, all layers of them."""
    import torch

    right, wrong = reference.output.hidden_states, run.output.hidden_states
    if right is None or wrong is None:
        return {}
    size = min(len(right), len(wrong), position)
    a, b = right[:size].double(), wrong[:size].double()
    unequal = (a != b).any(-1)
    scale = a.abs().amax(-1)
    distance = (a - b).abs().amax(-1).nan_to_num(nan=float("inf"), posinf=float("inf"))
    relative = torch.where(unequal, distance / scale.clamp(min=torch.finfo(a.dtype).tiny), 0.0)

    def at(position: int, point: int) -> Difference:
        return Difference(
            position=position,
            layer=point - 1,
            place=Place.of(run.output, position, run.chunk),
            largest=float(distance[position, point]),
            scale=float(scale[position, point]),
        )

    def first(mask: Tensor) -> Difference | None:
        places = mask.nonzero()
        return at(*places[0].tolist()) if len(places) else None

    largest = None
    if unequal.any():
        largest = at(*divmod(int(relative.argmax()), relative.shape[1]))
    return {
        "num_rows": size,
        "first": first(unequal),
        "first_beyond_rounding": first(relative > ROUNDING[run.dtype]),
        "largest": largest,
    }
