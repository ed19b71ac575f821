"""What a plugin declares, and what the user's settings make of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import specplug
from specplug import AlgorithmInfo, Capabilities, Conformance, Defaults, SpecConfig, UsageError
from specplug.settings import Integer, setting


def info(**changes: object) -> AlgorithmInfo:
    declared = {
        "name": "X",
        "summary": "an algorithm",
        "api_version": 1,
        "capabilities": Capabilities(branching=True),
        "defaults": Defaults(num_steps=3, topk=2, num_draft_tokens=6),
    }
    return AlgorithmInfo(**{**declared, **changes})


def shape(config: SpecConfig) -> tuple[int, int, int]:
    return config.num_steps, config.topk, config.num_draft_tokens


def test_what_is_not_typed_is_the_algorithms_default() -> None:
    assert shape(SpecConfig.resolve(info())) == (3, 2, 6)
    assert shape(SpecConfig.resolve(info(), num_draft_tokens=9)) == (3, 2, 9)


@pytest.mark.parametrize("length", [0.5, "4", None])
def test_accept_length_of_no_sense_is_refused(length: object) -> None:
    with pytest.raises(ValueError, match=r"accept_lengths\['m'\].*at least 1"):
        Conformance(accept_lengths={"m": length})


def test_another_depth_or_width_brings_its_own_number_of_nodes() -> None:
    assert shape(SpecConfig.resolve(info(), num_steps=5)) == (5, 2, 11)
    assert shape(SpecConfig.resolve(info(), topk=1)) == (3, 1, 4)
    assert shape(SpecConfig.resolve(info(), num_steps=3, topk=2)) == (3, 2, 6)


@pytest.mark.parametrize("ratio", [0, -1.5, "2"])
def test_speed_up_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match=r"speed_ups\['m'\].*above 0"):
        AlgorithmInfo(name="A", summary="", api_version=1, speed_ups={"m": ratio})


@pytest.mark.parametrize("option", ["num_steps", "topk", "num_draft_tokens"])
def test_a_number_below_one_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}=0: expected an integer of at least 1"):
        SpecConfig.resolve(info(), **{option: 0})


def test_a_declared_lookahead_is_that_of_the_run_without_a_word() -> None:
    config = SpecConfig.resolve(info(draft_lookahead=3))
    assert (config.draft_lookahead, config.adjustments) == (3, ())
    assert SpecConfig.resolve(info()).draft_lookahead is None
    for wrong in (-1, "1", 1.5):
        with pytest.raises((TypeError, ValueError), match="draft_lookahead"):
            info(draft_lookahead=wrong)


def test_a_chain_only_algorithm_refuses_branches() -> None:
    chain = info(capabilities=Capabilities(), defaults=Defaults(num_steps=3))
    with pytest.raises(UsageError, match="topk=2: X drafts chains only"):
        SpecConfig.resolve(chain, topk=2)


def test_draft_weights_are_the_typed_or_the_shipped_ones() -> None:
    model = info(capabilities=Capabilities(draft_model=True), defaults=Defaults(),
                 weights={"tiny-code": Path("shipped")})  # fmt: skip
    resolve = SpecConfig.resolve
    assert resolve(model, model_name="tiny-code").draft_model_path == Path("shipped")
    typed = resolve(model, draft_model_path=Path("typed"), model_name="tiny-code")
    assert typed.draft_model_path == Path("typed")
    with pytest.raises(UsageError, match="it ships them for tiny-code"):
        resolve(model, model_name=None)


def test_a_draft_path_without_a_draft_model_is_refused() -> None:
    with pytest.raises(UsageError, match="X has no draft model"):
        SpecConfig.resolve(info(), draft_model_path=Path("typed"))


@pytest.mark.parametrize(
    ("typed", "fitted", "slots"),
    [
        ((3, 1, 4), (3, 1, 4), 0),
        ((3, 1, 9), (3, 1, 4), 0),
        ((5, 1, 3), (2, 1, 3), 0),
        ((5, 1, 1), (1, 1, 1), 0),
        ((5, 4, 2), (1, 4, 2), 4),
        ((1, 1, 2), (1, 1, 2), 0),
        ((4, 3, 12), (4, 3, 12), 9),
        ((2, 3, 99), (2, 3, 13), 3),
        ((1, 4, 99), (1, 4, 5), 4),
        ((1, 2, 2), (1, 2, 2), 2),
    ],
)
def test_a_feature_drafter_gets_what_it_can_use(
    typed: tuple[int, int, int], fitted: tuple[int, int, int], slots: int
) -> None:
    config = SpecConfig(
        algorithm="X", num_steps=typed[0], topk=typed[1], num_draft_tokens=typed[2]
    ).fit_feature_draft()
    assert shape(config) == fitted
    assert config.num_draft_slots == slots
    assert bool(config.adjustments) == (typed != fitted)
    with pytest.raises(UsageError, match="num_draft_tokens=1: expected at least 2 with topk=2"):
        SpecConfig(algorithm="X", topk=2, num_draft_tokens=1).fit_feature_draft()


def test_adjustments_keep_their_reasons() -> None:
    config = SpecConfig.resolve(info()).adjust("because", num_steps=1).adjust("too", topk=1)
    assert config.adjustments == ("because", "too")
    assert shape(config) == (1, 1, 6)


def test_every_exported_name_is_there() -> None:
    for name in specplug.__all__:
        assert getattr(specplug, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = specplug.Nothing


def test_importing_specplug_loads_nothing_heavy() -> None:
    code = "import specplug, sys; print([m for m in sys.modules if m in {heavy}])"
    heavy = {"torch", "transformers", "triton", "tokenizers", "safetensors", "numpy"}
    out = subprocess.run(
        [sys.executable, "-c", code.replace("{heavy}", repr(heavy))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == "[]"


def test_the_core_names_no_algorithm() -> None:
    """Docstrings may give one as an example; code may not. What drafts in a package that
    ``specplug new`` makes is a word of the field's, in lower case."""
    import ast

    from specplug.cli.new import KINDS

    names = {"EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "DFLASH", "DSPARK", "NGRAM"}
    names |= {"PEAGLE", "SPARSE_SELF", "STANDALONE"}
    for file in Path(specplug.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_kind = file.name == "new.py" and node.value in KINDS
                assert is_kind or node.value.upper() not in names, (file, node.value)
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert not name.lower().startswith(("is_eagle", "is_dflash", "is_ngram")), file


@attrs.frozen(kw_only=True)
class Own:
    """The settings of an algorithm called ``MINE``."""

    mine_depth: int = setting(3, Integer(), "Depth.", group="MINE", unit="tokens")


def test_own_settings_are_those_that_were_typed() -> None:
    mine = AlgorithmInfo(name="MINE", summary="mine", api_version=1, settings=Own)
    assert SpecConfig.resolve(mine).settings == Own()
    assert SpecConfig.resolve(mine, settings={"mine_depth": 5}).settings == Own(mine_depth=5)
    assert SpecConfig.resolve(info()).settings is None


@pytest.mark.parametrize(
    ("own", "typed", "message"),
    [
        (Own, {"mine_depth": 0}, "mine_depth=0: expected an integer of at least 1"),
        (Own, {"depth": 1}, "'depth' is no setting of MINE: it has mine_depth"),
        (None, {"mine_depth": 1}, "'mine_depth' is no setting of MINE: it has no settings of"),
    ],
)
def test_own_setting_that_cannot_be_used_is_refused(
    own: type | None, typed: dict[str, int], message: str
) -> None:
    mine = AlgorithmInfo(name="MINE", summary="mine", api_version=1, settings=own)
    with pytest.raises(UsageError, match=message):
        SpecConfig.resolve(mine, settings=typed)


def test_own_settings_under_another_name_are_no_declaration() -> None:
    with pytest.raises(ValueError, match=r"Own.mine_depth: expected .* begins with other_"):
        AlgorithmInfo(name="OTHER", summary="other", api_version=1, settings=Own)
    bare = attrs.make_class("Bare", {"mine_depth": attrs.field(default=1)})
    with pytest.raises(ValueError, match=r"Bare.mine_depth: expected a specplug.settings.setting"):
        AlgorithmInfo(name="MINE", summary="mine", api_version=1, settings=bare)
