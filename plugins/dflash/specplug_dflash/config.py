"""Read a DFlash checkpoint's ``config.json``, in either published layout. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specplug import CheckpointError, SpecConfig, UsageError

# The supported values of options that change how a block is computed.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "projector_type": (None, "domino", "lilicorr", "dflash"),
    "hidden_act": (None, "silu"),
}


@attrs.frozen(kw_only=True)
class LiLiCorrConfig:
    """The sizes of a LiLiCorr head.

    Attributes:
        candidate_topk: C, the candidates of each row.
        hidden_size: the width of its layers; 0: the draft's.
        num_layers, num_heads, mlp_ratio: of its transformer.
        factor_dim: the width of what is compared.
        vector_eps: the least length of that, as a divisor.
        logit_scale: the logit of two vectors that are alike.
    """

    candidate_topk: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float


@attrs.frozen(kw_only=True)
class DFlashConfig:
    """The sizes of a draft network, and of the target that it was trained for.

    Attributes:
        hidden_size: the width of the draft's layers, of the embedding and of the LM head's input.
        target_hidden_size: the width of each target feature.
        vocab_size, draft_vocab_size: the number of tokens of the target, and of the draft's LM
            head.
        attention_bias: whether all four projections of an attention layer have biases.
        rope: the keys that ``layers.Rotary`` reads.
        block_size: rows of a block, the bonus token included.
        sample_from_anchor: each row of a block predicts the token after its own, so that the bonus
            token's row, the anchor, drafts too. False: each row predicts its own token, and the
            anchor, whose token is known, drafts nothing.
        shift_label: as ``sample_from_anchor``, but the last row drafts nothing (Domino).
        mask_token_id: the target's id of the mask token, whose embedding drafted rows read.
        feature_layers: the target layers whose *inputs* are fused; the number of layers stands for
            the last one's output.
        normed_last: the last layer's output is read after the target's final norm, as transformers
            gives it to z-lab's code; ``speculators`` trains on the norm's input.
        causal: for each draft layer, whether the rows of a block see only earlier rows.
        windows: for each draft layer, the positions that a row looks back, its own included; None:
            all. A row of a layer that is not causal sees the later rows of its block in any case.
        num_target_layers: the number of layers of the target that it was trained for; None if the
            checkpoint does not say.
        conv_kernel_size, conv_group_size: the taps of the convolutions in each layer, and the
            channels that share a kernel's variable part; 0 taps: there are none (DFlash 2).
        selector_rank, selector_top_k: the rank of the candidate selector, and the candidates of
            each row that it chooses among; rank 0: there is none (DFlash 2).
        input_embedding_scale, output_multiplier: of the embeddings that are read, and of the
            logits.
        final_logit_softcapping: the bound of the logits; 0: none.
        gru_hidden_dim, emb_dim: the widths of a Domino head's state, and of its bottleneck; 0:
            there is no such head.
        pure_draft_prefix_len: the first tokens of a block that are drafted without that head.
        lilicorr: the sizes of a LiLiCorr head; None: there is none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope: Mapping[str, Any] = attrs.field(factory=dict)
    block_size: int
    sample_from_anchor: bool = False
    shift_label: bool = False
    mask_token_id: int
    feature_layers: tuple[int, ...]
    normed_last: bool = False
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    num_target_layers: int | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 1
    selector_rank: int = 0
    selector_top_k: int = 1
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    gru_hidden_dim: int = 0
    emb_dim: int = 0
    pure_draft_prefix_len: int = 0
    lilicorr: LiLiCorrConfig | None = None

    @property
    def candidates(self) -> int:
        """The candidates of each row whose pairs are scored; 0: no pairs are."""
        if self.lilicorr is not None:
            return self.lilicorr.candidate_topk
        return self.selector_top_k if self.selector_rank else 0

    @property
    def is_drawn(self) -> bool:
        """Whether a head draws a block's tokens one after the other."""
        return self.gru_hidden_dim > 0

    @property
    def most_steps(self) -> int:
        """The tokens that a block drafts."""
        return self.block_size - self.idle_rows

    @property
    def idle_rows(self) -> int:
        """The rows of a block that draft nothing: its first, its last, or none."""
        return 0 if self.sample_from_anchor else 1

    @property
    def first_row(self) -> int:
        """The first row of a block that drafts a token: 0 where the anchor's does, else 1."""
        return 0 if self.sample_from_anchor or self.shift_label else 1

    def fit(self, config: SpecConfig) -> SpecConfig:
        """Limit a run's drafts to one block, or to a tree of its candidates.

        Raises:
            UsageError: the run asks for a tree that there cannot be.
        """
        most = self.most_steps
        if config.num_steps > most:
            reason = (
                f"num_steps {config.num_steps} -> {most}: "
                f"the draft model was trained for blocks of {self.block_size} tokens"
            )
            config = config.adjust(reason, num_steps=most)
        if config.topk == 1:
            return config.fit_feature_draft()
        return self._fit_tree(config)

    def _fit_tree(self, config: SpecConfig) -> SpecConfig:
        """Limit a tree of S levels, whose nodes have K children each, to N nodes."""
        steps, topk, nodes = config.num_steps, config.topk, config.num_draft_tokens
        if nodes < 2:
            raise UsageError(
                f"num_draft_tokens={nodes}: expected at least 2 with topk={topk}, "
                "the root and one candidate"
            )
        if topk > self.draft_vocab_size:
            raise UsageError(
                f"topk={topk}: the draft model knows {self.draft_vocab_size} tokens; "
                "expected no more than these"
            )
        if 0 < self.candidates < topk:
            reason = f"topk {topk} -> {self.candidates}: the draft model's candidates of a row"
            topk = self.candidates
            config = config.adjust(reason, topk=topk)
        if steps > nodes - 1:
            reason = f"num_steps {steps} -> {nodes - 1}: {nodes} nodes reach no deeper"
            config = config.adjust(reason, num_steps=nodes - 1)
        steps = config.num_steps
        most = sum(topk**level for level in range(steps + 1))
        if self.is_drawn:  # K nodes of a level go on
            most = min(most, 1 + topk + (steps - 1) * topk**2)
        if nodes > most:
            reason = f"num_draft_tokens {nodes} -> {most}: all paths of {config.num_steps} steps"
            config = config.adjust(reason, num_draft_tokens=most)
        return config


def read_config(path: Path) -> DFlashConfig:
    """Read ``path / "config.json"``.

    Raises:
        CheckpointError: the file is missing, unreadable or incomplete, or has an option that is
            not supported.
    """
    return parse_config(read_keys(path), path / "config.json")


def read_keys(path: Path) -> dict[str, Any]:
    """Read the keys of ``path / "config.json"``.

    Raises:
        CheckpointError: the file is missing or unreadable.
    """
    file = path / "config.json"
    try:
        keys = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"draft model {path}: cannot read its config.json ({error.strerror})"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return keys


def parse_config(keys: Mapping[str, Any], file: Path) -> DFlashConfig:
    """Parse ``config.json`` in z-lab's layout or in ``speculators``'.

    z-lab keeps the decoder's sizes at the top, and DFlash's own keys at the top or under
    ``dflash_config``. ``speculators`` keeps the sizes under ``transformer_layer_config``.

    Args:
        keys: the content of the file.
        file: the file, for messages.

    Raises:
        CheckpointError: a key is missing, or has a value that is not supported.
    """
    keys = flatten(keys)

    def require(key: str) -> Any:
        if keys.get(key) is None:
            raise CheckpointError(f"{file}: {key!r} is missing")
        return keys[key]

    for key, accepted in _UNSUPPORTED.items():
        if keys.get(key) not in accepted:
            raise CheckpointError(
                f"{file}: {key}={keys[key]!r} is not supported, expected {accepted[-1]!r}"
            )
    heads, hidden, vocab = (
        require(k) for k in ("num_attention_heads", "hidden_size", "vocab_size")
    )
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=require("intermediate_size"),
        num_hidden_layers=require("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or hidden // heads,
        target_hidden_size=keys.get("target_hidden_size") or hidden,
        vocab_size=vocab,
        draft_vocab_size=keys.get("draft_vocab_size") or vocab,
        rms_norm_eps=keys.get("rms_norm_eps") or 1e-6,
        attention_bias=bool(keys.get("attention_bias")),
        rope=keys,
        block_size=require("block_size"),
        sample_from_anchor=bool(keys.get("sample_from_anchor")),
        mask_token_id=require("mask_token_id"),
        feature_layers=_feature_layers(keys, file),
        normed_last=not keys.get("aux_hidden_state_layer_ids"),
        causal=_causal(keys, file),
        windows=_windows(keys, file),
        num_target_layers=keys.get("num_target_layers"),
        **_second_version(keys, file),
        **_domino(keys, file),
        lilicorr=_lilicorr(keys, file),
        input_embedding_scale=keys.get("input_embedding_scale") or 1.0,
        output_multiplier=keys.get("output_multiplier") or 1.0,
        final_logit_softcapping=keys.get("final_logit_softcapping") or 0.0,
    )
    _check(config, file)
    return config


def flatten(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested keys. Outer keys replace those of ``transformer_layer_config``, and
    ``dflash_config`` replaces both."""
    decoder = keys.get("transformer_layer_config") or {}
    outer = {key: value for key, value in keys.items() if value is not None}
    return {**decoder, **outer, **(keys.get("dflash_config") or {})}


def _second_version(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the sizes of DFlash 2's parts, as far as a checkpoint has them."""
    found: dict[str, Any] = {}
    for names in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
        values = [keys.get(name) for name in names]
        if values == [None, None]:
            continue
        for name, value in zip(names, values, strict=True):
            if type(value) is not int or value < 1:
                raise CheckpointError(
                    f"{file}: {name}={value!r}, expected a number of at least 1, as "
                    f"{' and '.join(names)} stand together"
                )
            found[name] = value
    return found


def _domino(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the sizes of a Domino head, if a checkpoint has one."""
    if keys.get("projector_type") != "domino":
        if keys.get("shift_label"):
            raise CheckpointError(f"{file}: shift_label=True, expected a projector_type of domino")
        return {}
    for name, least in (("gru_hidden_dim", 1), ("emb_dim", 1), ("pure_draft_prefix_len", 0)):
        if type(keys.get(name)) is not int or keys[name] < least:
            raise CheckpointError(
                f"{file}: {name}={keys.get(name)!r}, expected a number of at least {least}"
            )
    if keys.get("selector_rank"):
        raise CheckpointError(f"{file}: a Domino head and a candidate selector, expected one")
    return {
        "gru_hidden_dim": keys["gru_hidden_dim"],
        "emb_dim": keys["emb_dim"],
        "pure_draft_prefix_len": keys["pure_draft_prefix_len"],
        "shift_label": bool(keys.get("shift_label")),
    }


def _lilicorr(keys: Mapping[str, Any], file: Path) -> LiLiCorrConfig | None:
    """Return the sizes of a LiLiCorr head, if a checkpoint has one."""
    enabled = keys.get("lilicorr_enabled", any(key.startswith("lilicorr_") for key in keys))
    if not enabled:
        return None
    found: dict[str, Any] = {}
    for field in attrs.fields(LiLiCorrConfig):
        key, least = f"lilicorr_{field.name}", 0 if field.name == "hidden_size" else 1
        value: Any = keys.get(key)
        is_whole = field.name not in ("mlp_ratio", "vector_eps", "logit_scale")
        kinds = (int,) if is_whole else (int, float)
        if type(value) not in kinds or (value < least if is_whole else value <= 0):
            wanted = f"a number of at least {least}" if is_whole else "a number greater than 0"
            raise CheckpointError(f"{file}: {key}={value!r}, expected {wanted}")
        found[field.name] = value
    if keys.get("selector_rank") or keys.get("gru_hidden_dim"):
        raise CheckpointError(f"{file}: a LiLiCorr head and another one, expected one")
    return LiLiCorrConfig(**found)


def _feature_layers(keys: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    """Return the layers whose inputs are fused.

    ``speculators`` counts inputs. z-lab's ``target_layer_ids`` are layers whose *outputs* are
    fused; by default they are spread evenly from layer 1 to the third last, one for each draft
    layer.
    """
    inputs = keys.get("aux_hidden_state_layer_ids")
    if inputs:
        return tuple(inputs)
    outputs = keys.get("target_layer_ids")
    if not outputs:
        depth, count = keys.get("num_target_layers"), keys.get("num_hidden_layers")
        if depth is None or count is None:
            raise CheckpointError(f"{file}: 'target_layer_ids' is missing")
        spread = (1 + i * (depth - 4) / (count - 1) for i in range(count))
        outputs = [depth // 2] if count == 1 else [round(layer) for layer in spread]
    return tuple(layer + 1 for layer in outputs)


def _causal(keys: Mapping[str, Any], file: Path) -> tuple[bool, ...]:
    """Return whether each layer is causal.

    Layers with a sliding window in ``layer_types`` are causal, unless the checkpoint says otherwise
    (``is_causal``, ``dflash_config.causal``, ``sliding_window_non_causal``).
    """
    count = keys.get("num_hidden_layers") or 0
    kinds = keys.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{file}: layer_types={kinds!r}, expected one for each of {count} layers, "
            "full_attention or sliding_attention"
        )
    for key in ("is_causal", "causal"):
        if keys.get(key) is not None:
            return (bool(keys[key]),) * count
    if keys.get("sliding_window_non_causal"):
        return (False,) * count
    return tuple(kind == "sliding_attention" for kind in kinds)


def _windows(keys: Mapping[str, Any], file: Path) -> tuple[int | None, ...]:
    """Return the window of each layer, or None.

    ``layer_types`` says which layers have a window; without it ``dflash_config.use_swa`` gives one
    to every layer. ``swa_window_size`` has priority over the decoder's ``sliding_window``.
    """
    count = keys.get("num_hidden_layers") or 0
    sliding = [kind == "sliding_attention" for kind in keys.get("layer_types") or ()]
    if not any(sliding):
        sliding = [bool(keys.get("use_swa"))] * count
    window = keys.get("swa_window_size") or keys.get("sliding_window")
    if any(sliding) and (type(window) is not int or window < 1):
        raise CheckpointError(
            f"{file}: a layer has a sliding window and swa_window_size is "
            f"{keys.get('swa_window_size')!r}, sliding_window {keys.get('sliding_window')!r}; "
            "expected a number of positions in one of them"
        )
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _check(config: DFlashConfig, file: Path) -> None:
    if config.hidden_size % config.conv_group_size:
        raise CheckpointError(
            f"{file}: conv_group_size={config.conv_group_size}, expected a divisor of hidden_size "
            f"{config.hidden_size}"
        )
    if config.candidates > config.draft_vocab_size:
        name = "selector_top_k" if config.selector_rank else "lilicorr_candidate_topk"
        raise CheckpointError(
            f"{file}: {name}={config.candidates}, expected at most the draft's "
            f"{config.draft_vocab_size} tokens"
        )
    if (head := config.lilicorr) and (head.hidden_size or config.hidden_size) % head.num_heads:
        raise CheckpointError(
            f"{file}: lilicorr_num_heads={head.num_heads}, expected a divisor of "
            f"{head.hidden_size or config.hidden_size}, the head's width"
        )
    if config.most_steps < 1:
        raise CheckpointError(
            f"{file}: block_size={config.block_size}, expected at least {1 + config.idle_rows}: "
            "the bonus token and one to be drafted"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            f"{file}: mask_token_id={config.mask_token_id}, expected an id of the vocabulary of "
            f"{config.vocab_size} tokens"
        )
