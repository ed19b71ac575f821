"""How long STANDALONE's accepted paths are where the draft model has another vocabulary.

    python benchmarks/vocabularies.py [--prompts 32] [--max-tokens 96] [--steps 4] [--halved FOLDER]

The shipped draft model with its rows of embedding and its tokenizer changed: its tokens under other
ids; the half of them that is merged last left out, which a text of code needs least; and both. A
draft cannot have a token that its model lacks, and reads all its pieces. So beside each stands what
the draft model as it is accepts, where it is held to the shared tokens, too: what is lost against
that is lost by reading. The shipped model has never seen these pieces; ``--halved`` takes a model
that was trained with that vocabulary (``examples/train_tiny_code/standalone.py --vocabulary``). The
tokens are those of NONE in all rows, which is checked. Accept lengths depend on no clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from measurement import head, line
from other_vocabularies import default_tokenizer, renumbered, with_vocabulary, without

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams, TokenMap
from specplug.registry import Registry

ALGORITHM = "STANDALONE"


@attrs.frozen
class Vocabulary:
    """A draft model of another vocabulary.

    Attributes:
        name: for the table.
        path: of the model.
        shared: the target's tokens that it knows; None: all.
    """

    name: str
    path: Path
    shared: Sequence[int] | None = None


def vocabularies(model: Path, folder: Path, trained: Path | None) -> Iterator[Vocabulary]:
    """Write the draft models to a folder, and yield them.

    Args:
        trained: a model of the halved vocabulary; None: one is cut out of ``model``.
    """
    size = len(default_tokenizer())
    yield Vocabulary("the target's", model)
    new_ids = _shuffled(size)
    own = new_ids.argsort().tolist()
    path = with_vocabulary(model, folder / "permuted", renumbered(new_ids.tolist()), own)
    yield Vocabulary("permuted", path)
    halved, ids = without(lambda token, id_: id_ >= size // 2)
    half = trained or with_vocabulary(model, folder / "halved", halved, ids)
    yield Vocabulary("halved", half, ids)
    new_ids = _shuffled(len(ids))
    both = renumbered(new_ids.tolist(), halved)
    path = with_vocabulary(half, folder / "both", both, new_ids.argsort().tolist())
    yield Vocabulary("permuted and halved", path, ids)


def _shuffled(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))


def accept_length(
    path: Path, prompts: list[str], params: list[SamplingParams], steps: int
) -> tuple[float, list[Any], str]:
    """Return the accept length with a draft model, the outputs' tokens and what its map is."""
    with LLM(
        speculative_algorithm=ALGORITHM,
        speculative_draft_model_path=path,
        speculative_num_steps=steps,
    ) as llm:
        outputs = llm.generate(prompts, params)
        kind = llm.engine.runtime.worker.vocabulary.kind
        return llm.stats()["mean_accept_length"], [each.token_ids for each in outputs], kind


def held_to(shared: Sequence[int], model: Path, *rest: Any) -> float:
    """Return the accept length of a draft model of the target's vocabulary that drafts none but
    these tokens."""
    between = TokenMap.between
    ids = torch.tensor(sorted(shared))

    def some(*arguments: Any, **named: Any) -> TokenMap:
        return attrs.evolve(between(*arguments, **named), target_ids=ids, draft_ids=ids)

    TokenMap.between = some  # type: ignore[method-assign]
    try:
        return accept_length(model, *rest)[0]
    finally:
        TokenMap.between = between  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--halved", type=Path, help="a draft model of the halved vocabulary")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
    prompts = [json.loads(each)["prompt"] for each in lines]
    (model,) = map(Path, Registry().select(ALGORITHM).info.weights.values())
    print(head("temperature", "vocabulary", "map", "accept length", "over shared tokens", "share"))
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True, seed=i,
                           temperature=temperature)
            for i in range(len(prompts))
        ]  # fmt: skip
        with LLM() as llm:
            expected = [output.token_ids for output in llm.generate(prompts, params)]
        with tempfile.TemporaryDirectory() as folder:
            whole = 0.0
            for each in vocabularies(model, Path(folder), arguments.halved):
                rest = prompts, params, arguments.steps
                found, tokens, kind = accept_length(each.path, *rest)
                assert tokens == expected, f"{each.name}: not the tokens of NONE"
                whole = whole or found
                limit = whole if each.shared is None else held_to(each.shared, model, *rest)
                cells = f"{found:.3f}", f"{limit:.3f}", f"{100 * found / limit:.1f} %"
                print(line([f"{temperature:.0f}", each.name, kind, *cells]), flush=True)


if __name__ == "__main__":
    main()
