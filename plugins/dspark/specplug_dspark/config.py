"""Read a DSpark checkpoint's ``config.json``, in either published layout. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from specplug import CheckpointError
from specplug_dflash.config import DFlashConfig, flatten, parse_config, read_keys

HeadType = Literal["vanilla", "gated", "rnn"]


@attrs.frozen(kw_only=True)
class DSparkConfig(DFlashConfig):
    """The sizes of a draft network: those of its DFlash backbone, and of its two heads.

    Attributes:
        markov_rank: r, the width of the Markov head; 0: there is none.
        markov_head_type: what the head knows beside the token before (see ``MarkovHead``).
        confidence_head: whether there is one.
        confidence_head_with_markov: whether it reads the embedding of the token before, too.
    """

    markov_rank: int = 0
    markov_head_type: HeadType = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def is_drawn(self) -> bool:
        """Whether a head draws a block's tokens one after the other."""
        return self.markov_rank > 0


def read_config(path: Path) -> DSparkConfig:
    """Read ``path / "config.json"``.

    deepseek-ai's layout keeps all keys at the top, and its blocks always draft from the anchor.
    ``speculators`` keeps the decoder's under ``transformer_layer_config``, and says by
    ``sample_from_anchor`` how its blocks draft: where it does not, as DFlash's.

    Raises:
        CheckpointError: the file is missing, unreadable or incomplete, or has an option that is
            not supported.
    """
    file = path / "config.json"
    keys = read_keys(path)
    return parse_heads(parse_config(_with_anchor(keys), file), flatten(keys), file)


def _with_anchor(keys: Mapping[str, Any]) -> dict[str, Any]:
    is_speculators = "transformer_layer_config" in keys
    return {"sample_from_anchor": not is_speculators, **keys}


def parse_heads(backbone: DFlashConfig, keys: Mapping[str, Any], file: Path) -> DSparkConfig:
    """Add to a backbone's sizes those of the heads, from the flattened keys of a file."""
    rank = _integer(keys, "markov_rank", file)
    kind: Any = keys.get("markov_head_type") or "vanilla"
    if kind not in get_args(HeadType):
        raise CheckpointError(
            f"{file}: markov_head_type={kind!r} is not supported, expected one of "
            f"{', '.join(get_args(HeadType))}"
        )
    confidence = bool(keys.get("enable_confidence_head"))
    with_markov = confidence and bool(keys.get("confidence_head_with_markov"))
    if with_markov and not rank:
        raise CheckpointError(
            f"{file}: confidence_head_with_markov=True and markov_rank=0, expected a Markov head, "
            "whose embedding the confidence head reads"
        )
    return DSparkConfig(
        **attrs.asdict(backbone, recurse=False),
        markov_rank=rank,
        markov_head_type=kind,
        confidence_head=confidence,
        confidence_head_with_markov=with_markov,
    )


def _integer(keys: Mapping[str, Any], key: str, file: Path) -> int:
    value = keys.get(key)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{file}: {key}={value!r}, expected a number of at least 0")
    return value
