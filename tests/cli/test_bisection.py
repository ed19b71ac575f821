"""``specplug doctor --bisect``: its report, its exit code, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specplug import UsageError
from specplug.bench.parting import Difference, Parting, Place, TokenScore
from specplug.cli import bisection, main
from specplug.model.sampler import Sampler

PROMPT = "abcdefgh" * 5


def doctor(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)], input=stdin)


def refusal(done: Result) -> str:
    """The message of bad usage."""
    if isinstance(done.exception, UsageError):
        return str(done.exception)
    assert done.exit_code == 2
    return done.stderr


@pytest.fixture
def run(text_model: Any):
    """Bisect ``PROMPT`` with a small model."""

    def run(*options: Any, prompt: str = PROMPT, stdin: str | None = None) -> Result:
        length = ("--max-new-tokens", 24, "--ignore-eos", "--skip-model-check")
        return doctor("--bisect", text_model, prompt, *length, *options, stdin=stdin)

    return run


@pytest.fixture
def broken_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose another token where a pass gives the logits of several rows."""
    sample = Sampler.sample

    def wrong(self: Sampler, logits: Any, *more: Any) -> Any:
        found = sample(self, logits, *more)
        return (found + 1) % logits.shape[1] if len(logits) > 1 else found

    monkeypatch.setattr(Sampler, "sample", wrong)


def test_equal_runs_say_so_and_exit_with_0(run: Any) -> None:
    done = run("--speculative-algorithm", "NGRAM")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "equal: 24 tokens after a prompt of 20" in done.stdout
    assert "NGRAM with num_steps" in done.stdout
    own = "--ngram-index-scope", "request"  # NONE has no such setting
    report = json.loads(run("--speculative-algorithm", "NGRAM", *own, "--json").stdout)
    assert (report["equal"], report["tokens_compared"], report["culprits"]) == (True, 24, [])
    assert report["token_ids"]["reference"] == report["token_ids"]["run"]
    assert report["config"]["algorithm"] == "NGRAM"
    assert report["reference_config"]["algorithm"] == "NONE"


@pytest.mark.usefixtures("broken_sampler")
def test_wrong_token_names_the_setting_and_exits_with_1(run: Any) -> None:
    done = run("--speculative-algorithm", "NGRAM", "--ngram-index-scope", "request")
    assert (done.exit_code, done.stderr) == (1, "")
    *_, last = done.stdout.splitlines()
    assert last == "to blame: speculation; the tokens are right with speculative_algorithm='NONE'"
    assert "first wrong token: position " in done.stdout
    assert "chosen in   decode step " in done.stdout
    done = run("--speculative-algorithm", "NGRAM", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["culprits"][0]["speculative_algorithm"] == "NONE"
    index = report["parting"]["index"]
    right, wrong = report["token_ids"]["reference"], report["token_ids"]["run"]
    assert right[:index] == wrong[:index]
    assert right[index] != wrong[index]
    assert report["parting"]["first_beyond_rounding"] is None, "the target is right"
    tried = {each["part"]: each["status"] for each in report["tried"]}
    assert tried["overlap schedule"] == tried["kernels in C"] == "wrong"
    assert tried["CUDA graphs"] == "not on"


def test_prompt_of_standard_input(run: Any) -> None:
    report = json.loads(run("--json", prompt="-", stdin=PROMPT).stdout)
    assert (report["equal"], report["prompt_tokens"]) == (True, 20)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "--bisect: the prompt is ''; expected a prompt, or - for standard input"),
        ("-", "standard input is empty; expected a prompt"),
    ],
)
def test_empty_prompt_is_refused(run: Any, prompt: str, message: str) -> None:
    assert message in refusal(run(prompt=prompt, stdin=""))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--page-size", 4, "--temperature", 1],
            "--page-size, --temperature without --bisect: expected --bisect MODEL PROMPT",
        ),
        (["--bisect", "tiny-code"], "requires 2 arguments"),
        (["--bisect", "tiny-code", "x", "--speculative-algorithm", "NGRM"], "NGRAM"),
        (["--bisect", "tiny-code", "x", "--page-size", 0], "--page-size"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    assert message in refusal(doctor(*arguments))


def parting(**changes: Any) -> Parting:
    first = Difference(11, 0, Place("decode", 2, 0), 0.5, 2.0)
    found: dict[str, Any] = {
        "is_seen": True,
        "position": 13,
        "index": 8,
        "place": Place("prefill", 2, 3),
        "expected": TokenScore(5, " a", -1.0, -2.0),
        "found": TokenScore(6, "\n", -1.0001, -1.0),
        "reference_gap": 1e-4,
        "is_near_tie": True,
        "num_rows": 13,
        "first": first,
        "first_beyond_rounding": first,
        "largest": first,
    }
    return Parting(**{**found, **changes})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "  gap         0.0001 in the reference: a near-tie: rounding alone may flip it"),
        ({}, "  found       6 '\\n'"),
        ({}, "  chosen in   chunk 2 of the prompt, row 3"),
        (
            {},
            "  wrong from  position 11, layer 0, decode step 2, row 0 of the accepted path: "
            "differs by 0.5, values up to 2",
        ),
        ({"found": TokenScore(None, None, None, None)}, "  found       nothing: the output ends"),
        ({"reference_gap": None}, "  gap         large: the token is not among the likely ones"),
        ({"first_beyond_rounding": None}, "  wrong       nowhere: all differences are as small"),
        ({"first": None}, "hidden states: equal in every bit at all 13 positions before it"),
        ({"is_seen": False}, "hidden states: with these kept, the run gives the right tokens."),
    ],
)
def test_report_says_where_runs_part(changes: Any, line: str) -> None:
    lines = bisection.lines_of_parting(parting(**changes), again=False)
    assert any(each.startswith(line) for each in lines), lines


def test_report_says_that_the_cache_had_the_prompt() -> None:
    assert (
        "when the prompt was in the prefix cache"
        in bisection.lines_of_parting(parting(), again=True)[0]
    )
