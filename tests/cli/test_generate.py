"""``specplug generate`` on the default model."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import attrs
import pytest
from click.testing import CliRunner, Result
from warm_process import WarmProcess, start_command, written_to_terminal

from specplug import LLM, RequestOutput, SamplingParams, UsageError
from specplug.cli import generate as command
from specplug.cli import main

PROMPT = "def mean(values):\n    return sum(values)"
LOOP = "".join(f"    self.assertEqual(f(x{i}), x)\n" for i in range(8))


def generate(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def report(*arguments: str, stdin: str | bytes | None = None, told: str = ""):
    """Run it with ``--json``; what it printed. It warns of ``told`` and of nothing else."""
    done = generate("--json", *arguments, stdin=stdin)
    assert (done.exit_code, done.stderr) == (0, told), done.stderr
    return json.loads(done.stdout)


@cache
def plain() -> LLM:
    return LLM(disable_radix_cache=True)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    if plain.cache_info().currsize:
        plain().close()
        plain.cache_clear()


def completion(prompt: str, **settings: object) -> RequestOutput:
    """What ``LLM`` gives for a prompt."""
    return plain().generate(prompt, SamplingParams(**settings))[0]  # type: ignore[arg-type]


def test_text_goes_to_stdout_and_statistics_to_stderr():
    done = generate("--max-new-tokens", "8", PROMPT)
    assert done.exit_code == 0
    text = completion(PROMPT, max_tokens=8).text
    assert text
    assert done.stdout.rstrip("\n") == text.rstrip("\n")
    assert done.stdout.endswith("\n")
    assert done.stderr.startswith("8 tokens in ")
    assert "tokens/s, mean accept length 1.00, NONE with num_steps 1, topk 1," in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_speculation_brought_is_the_last_line():
    tokens = "--max-new-tokens", "40", "--ignore-eos"
    done = generate(*tokens, "--speculative-algorithm", "NGRAM", LOOP)
    line = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"speculation: \d\.\d\d tokens a step; drafting took \d+ % of decoding.*", line
    )
    assert "speculation" not in generate("--max-new-tokens", "4", LOOP).stderr


def test_many_prompts_in_a_pipe():
    done = generate("--max-new-tokens", "6", PROMPT, LOOP)
    assert done.exit_code == 0
    outputs = plain().generate([PROMPT, LOOP], SamplingParams(max_tokens=6))
    expected = "".join(o.text if o.text.endswith("\n") else o.text + "\n" for o in outputs)
    assert done.stdout == expected
    assert done.stderr.startswith("12 tokens in ")


def test_json():
    shown = report("--max-new-tokens", "6", PROMPT, LOOP)
    assert shown.keys() == {"results", "totals", "stats", "config"}
    assert shown["stats"]["output_tokens"] == shown["totals"]["output_tokens"]
    assert [result["prompt"] for result in shown["results"]] == [PROMPT, LOOP]
    for result in shown["results"]:
        assert result["text"] == completion(result["prompt"], max_tokens=6).text
        assert len(result["token_ids"]) == 6
        assert result["finish_reason"] == "length"
        assert result["stop_reason"] is None
        assert result["accept_lens"] == [1] * 5  # the prefill gives the first token
        assert result["prompt_tokens"] > 4
    totals = shown["totals"]
    assert (totals["prompts"], totals["output_tokens"], totals["decode_steps"]) == (2, 12, 10)
    assert totals["prompt_tokens"] == sum(r["prompt_tokens"] for r in shown["results"])
    assert totals["mean_accept_length"] == 1.0
    assert 0 < totals["seconds"] < 60
    assert 0 < totals["load_seconds"] < 60
    assert totals["tokens_per_second"] == pytest.approx(12 / totals["seconds"])
    assert shown["config"]["algorithm"] == "NONE"
    assert shown["config"]["adjustments"] == []
    assert shown["config"]["draft_model_path"] is None


def test_json_when_no_decode_step_was_needed():
    shown = report("--max-new-tokens", "1", PROMPT)
    assert shown["totals"]["decode_steps"] == 0
    assert shown["totals"]["mean_accept_length"] is None
    assert "mean accept length -" in generate("--max-new-tokens", "1", PROMPT).stderr


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "7")])
def test_speculation_changes_nothing(sampling):
    many = ("--max-new-tokens", "40", "--ignore-eos", *sampling, LOOP, PROMPT)
    plain = report(*many)
    assert plain["totals"]["mean_accept_length"] == 1
    for name in ("ngram", "EAGLE3"):
        fast = report("--speculative-algorithm", name, *many)
        for key in ("token_ids", "text", "finish_reason"):
            assert [r[key] for r in fast["results"]] == [r[key] for r in plain["results"]]
        assert fast["config"]["algorithm"] == name.upper()
        if not sampling:
            assert fast["totals"]["mean_accept_length"] > 1.2


def test_the_seed_decides():
    def texts(seed):
        shown = report("--max-new-tokens", "12", "--temperature", "1", "--seed", seed, "x", "x")
        return [result["text"] for result in shown["results"]]

    first = texts("1")
    assert texts("1") == first
    assert texts("2") != first
    assert first[0] != first[1], "each prompt has its own noise"


def test_every_option_reaches_the_engine():
    shown = report(
        *("--model", "tiny-code", "--speculative-algorithm", "NGRAM", "--page-size", "1"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "9", "--chunked-prefill-size", "-1"),
        *("--max-running-requests", "2", "--max-total-tokens", "300"),
        *("--disable-overlap-schedule", "--dtype", "float64", "--device", "cpu"),
        *("--temperature", "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01"),
        *("--repetition-penalty", "1.1", "--presence-penalty", "0.1"),
        *("--frequency-penalty", "0.1", "--seed", "3", "--max-new-tokens", "7", "--ignore-eos"),
        *("--enable-mixed-chunk", "--disable-radix-cache"),
        *("--stop", "never comes", PROMPT),
        told="warning: NGRAM: num_draft_tokens 9 -> 4: a chain of 3 steps\n",
    )
    expected = {
        "algorithm": "NGRAM",
        "num_steps": 3,
        "topk": 1,
        "num_draft_tokens": 4,
        "adjustments": ["num_draft_tokens 9 -> 4: a chain of 3 steps"],
        "overlap": "off: disable_overlap_schedule",
        "prefix_cache": "off: disable_radix_cache",
        "mixed_chunk": "on",
        "chunked_prefill_size": None,
        "max_running_requests": 2,
        "page_size": 1,
        "max_total_tokens": 300,
        "dtype": "float64",
        "device": "cpu",
    }
    assert expected.items() <= shown["config"].items()
    with LLM(dtype="float64", seed=3) as llm:
        params = SamplingParams(
            **{"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "max_tokens": 7},
            **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
            ignore_eos=True,
        )
        assert shown["results"][0]["text"] == llm.generate(PROMPT, params)[0].text


def test_defaults_are_those_of_the_api():
    typed = command.generate.make_context("generate", ["x"]).params
    engine = inspect.signature(LLM.__init__).parameters
    for option in command.ENGINE:
        if option.name != "model":  # its default has a name and is None too
            assert typed[option.name] == engine[option.name].default, option.name
    sampling = {option.name: typed[option.name] for option in command.SAMPLING}
    assert SamplingParams(**sampling) == SamplingParams()


def test_adjustments_are_told():
    done = generate(
        *("--speculative-algorithm", "EAGLE3", "--speculative-num-draft-tokens", "9"),
        *("--max-new-tokens", "2", PROMPT),
    )
    told = "warning: EAGLE3: num_draft_tokens 9 -> 6: a chain of 5 steps"
    assert done.stderr.splitlines()[0] == told


def test_stop_strings():
    whole = completion(LOOP, max_tokens=24).text
    line = whole.index("\n", 4)
    shown = report("--max-new-tokens", "24", "--stop", "never", "--stop", whole[4 : line + 1], LOOP)
    result = shown["results"][0]
    assert result["text"] == whole[:4]
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", whole[4 : line + 1])


def test_standard_input_is_one_prompt():
    shown = report("--max-new-tokens", "2", "-", "x", stdin=LOOP)
    assert [result["prompt"] for result in shown["results"]] == [LOOP, "x"]


def test_prompt_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("import os\r\n\n  \nü = 1\x0c\n    return".encode())
    shown = report("--max-new-tokens", "2", "--prompt-file", file)
    found = [result["prompt"] for result in shown["results"]]
    assert found == ["import os", "ü = 1\x0c", "    return"]
    shown = report("--max-new-tokens", "2", "--prompt-file", file, "first")
    assert len(shown["results"]) == 4
    assert shown["results"][0]["prompt"] == "first"


LONG = "x = 1\n" * 2000

BAD_USAGE = [
    (("--speculative-algorithm", "NGRM", "x"), "unknown algorithm 'NGRM': did you mean NGRAM?"),
    (("--speculative-algorithm", "NGRM", "x"), "NONE"),
    (("--temperature", "-1", "x"), "temperature=-1.0: expected a number from 0 to 1000000"),
    (("--temperature", "nan", "x"), "temperature=nan: expected a"),
    (("--temperature", "warm", "x"), "'--temperature': 'warm' is not a valid float"),
    (("--top-p", "0", "x"), "top_p=0.0: expected a number in (0, 1]"),
    (("--top-k", "-2", "x"), "top_k=-2: expected an integer; 0 or -1 keeps all"),
    (("--min-p", "2", "x"), "min_p=2.0: expected a number in [0, 1]"),
    (("--repetition-penalty", "0", "x"), "repetition_penalty=0.0: expected a number from 1e-06 to"),
    (("--presence-penalty", "3", "x"), "presence_penalty=3.0: expected a number in [-2, 2]"),
    (("--stop", "", "x"), "stop=('',): expected non-empty strings"),
    (("--max-new-tokens", "0", "x"), "'--max-new-tokens': 0 is not in the range x>=1"),
    (("--page-size", "0", "x"), "'--page-size': 0 is not in the range x>=1"),
    (("--chunked-prefill-size", "0", "x"), "0 is neither at least 1 nor -1 (no limit)"),
    (("--dtype", "int8", "x"), "'int8' is not one of 'auto', 'float32'"),
    (("--no-such-option", "x"), "No such option '--no-such-option'"),
    (
        ("--speculative-algorithm", "NONE", "--speculative-eagle-topk", "2", "x"),
        "topk=2: NONE drafts chains only; use topk=1, or an algorithm that branches",
    ),
    ((), "no prompt was given; expected PROMPT arguments, - for standard input, or --prompt-file"),
    (("-", "-"), "prompt '-' stands more than once"),
    (("--prompt-file", "nowhere.txt"), "File 'nowhere.txt' does not exist"),
    (("--prompt-file", "."), "File '.' is a directory"),
    (("--regex", "", "x"), "regex='': expected a regular expression, or None"),
    (("--regex", "a", "--ebnf", "b", "x"), "regex and ebnf are given: expected at most one"),
    (("--json-schema", "@nowhere", "x"), "'--json-schema': file 'nowhere' cannot be read: No such"),
    (("--ebnf", "@.", "x"), "'--ebnf': file '.' cannot be read: Is a directory"),
]
NEEDS_TORCH = [
    (("",), "the prompt is empty; expected at least one token"),
    ((LONG,), "tokens; expected at most 2047, since the context is 2048 and one token must fit"),
    (("x", LONG), "prompt 2 of 2: the prompt has "),
    (("\udcff",), "prompt '\\udcff': expected Unicode text"),
    (("--device", "tpu9", "x"), "device='tpu9': expected cpu, cuda or cuda:N"),
    (("--device", "meta", "x"), "device='meta': expected cpu, cuda or cuda:N"),
    (("--max-total-tokens", "16", "x"), "raise max_total_tokens or lower max_tokens"),
]


def failure(*arguments: str, stdin: str | bytes | None = None) -> tuple[int, str]:
    """Exit code and message of a run that fails; nothing is on standard output."""
    done = generate(*arguments, stdin=stdin)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return done.exit_code, line


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    """Under SPECPLUG_DEBUG errors come with their traceback."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE)
def test_bad_usage_is_told_at_once(arguments, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "specplug.llm", None)  # importing it fails
    code, line = failure(*arguments)
    assert message in line
    assert code == 2


@pytest.mark.parametrize(("arguments", "message"), NEEDS_TORCH, ids=range(len(NEEDS_TORCH)))
def test_bad_usage_that_only_the_engine_knows(arguments, message):
    code, line = failure(*arguments)
    assert message in line
    assert code == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "standard input is empty"), (b"a\xff", "standard input is not UTF-8 (byte 1)")],
)
def test_unusable_standard_input(data, message):
    code, line = failure("-", stdin=data)
    assert (code, message in line) == (2, True), line


@pytest.mark.parametrize(
    ("data", "message"), [(b"\n \n", "has no prompt"), (b"\xff\n", "is not UTF-8 (byte 0)")]
)
def test_unusable_prompt_file(data, message, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    code, line = failure("--prompt-file", file)
    assert (code, f"prompt file '{file}' {message}" in line) == (2, True), line


@pytest.mark.parametrize("option", ["--json-schema", "--ebnf"])
def test_a_grammar_file_must_be_text(option, tmp_path):
    file = tmp_path / "grammar"
    file.write_bytes(b"a\xff")
    code, line = failure(option, f"@{file}", "x")
    assert (code, f"file '{file}' is not UTF-8 (byte 1); expected" in line) == (2, True), line


@pytest.mark.parametrize("option", ["--json-schema", "--ebnf"])
def test_a_grammar_comes_as_text_or_from_a_file(option, tmp_path, monkeypatch):
    file = tmp_path / "grammar"
    file.write_text("# ä\n")
    given = []

    def taken(**settings):
        given.append(settings[option[2:].replace("-", "_")])
        raise UsageError("taken")

    monkeypatch.setattr("specplug.sampling_params.SamplingParams", taken)
    for value in ("# ä\n", f"@{file}"):
        assert failure(option, value, "x") == (2, "error: taken")
    assert given == ["# ä\n", "# ä\n"]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root reads everything")
def test_prompt_file_that_may_not_be_read(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("x")
    file.chmod(0)
    code, line = failure("--prompt-file", file)
    assert (code, "is not readable" in line) == (2, True), line


def test_missing_model_folder(tmp_path):
    code, line = failure("--model", tmp_path / "gone", "x")
    assert code == 1
    assert f"model '{tmp_path / 'gone'}': no such folder; expected the folder of" in line
    code, line = failure("--model", tmp_path, "x")
    assert (code, "the folder has no config.json" in line) == (1, True)


def test_broken_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, line = failure("--model", tmp_path, "x")
    assert code == 1
    assert f"model '{tmp_path}': its config cannot be read: " in line


def test_no_such_hub_model():
    code, line = failure("--model", "nobody/nothing", "x")
    assert code == 1
    assert "model 'nobody/nothing': its config cannot be read: " in line


def eagle3(folder: Path) -> tuple[str, ...]:
    option = "--speculative-draft-model-path"
    return ("--speculative-algorithm", "EAGLE3", option, str(folder), "x")


def test_missing_draft_model(tmp_path):
    code, line = failure(*eagle3(tmp_path / "gone"))
    assert (code, f"draft model {tmp_path / 'gone'}: no such folder" in line) == (1, True)
    code, line = failure(*eagle3(tmp_path))
    assert (code, f"draft model {tmp_path}: it has no config.json" in line) == (1, True)


def test_draft_model_of_another_target(tmp_path):
    import torch
    from safetensors.torch import save_file

    sizes = {"hidden_size": 64, "vocab_size": 100, "intermediate_size": 32}
    config = {**sizes, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(64, 192)}, tmp_path / "model.safetensors")
    code, line = failure(*eagle3(tmp_path))
    assert code == 1
    assert f"draft model {tmp_path} does not fit the target: it was made for a hidden size" in line


def test_draft_weights_for_another_target_must_be_named(tmp_path):
    import shutil

    from specplug.algorithm import ASSETS

    shutil.copytree(ASSETS / "tiny_code", tmp_path / "model")
    code, line = failure("--model", tmp_path / "model", "--speculative-algorithm", "EAGLE3", "x")
    assert code == 2
    assert "EAGLE3 needs draft weights for this target: it ships them for tiny-code" in line
    assert "--speculative-draft-model-path" in line


def test_an_error_inside_a_request_fails(monkeypatch):
    def stream(self, prompt, params):
        yield RequestOutput(
            request_id="0",
            prompt=prompt,
            prompt_token_ids=(1,),
            text="",
            token_ids=(),
            finish_reason="error",
            error="RuntimeError: told",
        )

    monkeypatch.setattr(LLM, "stream", stream)
    done = generate("x")
    assert done.exit_code == 1
    assert done.stderr == "error: prompt 0: RuntimeError: told\n"


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "SPECPLUG_DEBUG"}


@attrs.define
class Command:
    """``specplug generate`` as a process of its own, and what it writes."""

    process: WarmProcess
    stdout: BinaryIO
    stderr: BinaryIO

    @classmethod
    def start(cls, *arguments: str) -> Command:
        """Start it, with pipes."""
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        process = start_command(
            ["generate", "--ignore-eos", *arguments],
            stdout=its_out,
            stderr=its_err,
            environment=environment(),
        )
        os.close(its_out)
        os.close(its_err)
        return cls(process, os.fdopen(out, "rb", 0), os.fdopen(err, "rb"))


def test_control_c_ends_it_cleanly():
    command = Command.start("--max-new-tokens", "2000", PROMPT)
    assert command.stdout.read(10), "it streams, also into a pipe"
    command.process.send_signal(signal.SIGINT)
    assert command.stdout.readall() is not None
    assert (command.process.wait(), command.stderr.read().strip()) == (130, b"")


def test_reader_that_goes_away():
    command = Command.start("--max-new-tokens", "2000", PROMPT)
    command.stdout.read(10)
    command.stdout.close()
    assert (command.stderr.read(), command.process.wait()) == (b"", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal():
    one = on_terminal("--max-new-tokens", "4", "x = 1")
    assert "\x1b[2mx = 1\x1b[0m" in one, "the prompt is dim"
    assert "4 tokens in" in one
    two = on_terminal("--max-new-tokens", "4", "x = 1", "y = 1")
    assert "2/2" in two, "a progress bar"
    assert "prompt 2 of 2" in two
    assert "8 tokens in" in two


def on_terminal(*arguments: str) -> str:
    """What the command writes to a terminal."""
    return written_to_terminal(
        ["generate", *arguments], {**environment(), "TERM": "xterm-256color"}
    )


def test_a_grammar_holds_the_output(tmp_path):
    schema = (
        '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],'
        ' "additionalProperties": false}'
    )
    file = tmp_path / "schema.json"
    file.write_text(schema)
    texts = []
    for argument in (schema, f"@{file}"):
        shown = report(
            *("--json-schema", argument, "--speculative-algorithm", "NGRAM"),
            *("--max-new-tokens", "200", PROMPT),
        )
        texts.append(shown["results"][0]["text"])
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["ok"] in (True, False)
    shown = report("--regex", "[a-c]{3}-[0-9]+", "--max-new-tokens", "12", PROMPT)
    assert re.fullmatch("[a-c]{3}-[0-9]+", shown["results"][0]["text"])
    done = generate("--regex", "(", PROMPT)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: regex='(': ")
    assert len(done.stderr.splitlines()) == 1


def test_verbose_says_what_is_loaded():
    algorithm = "--speculative-algorithm", "EAGLE3"
    done = generate("-v", *algorithm, "--max-new-tokens", "2", "--json", PROMPT)
    lines = [line for line in done.stderr.splitlines() if line.startswith("info: ")]
    whole = "\n".join(lines)
    assert re.search(r"model tiny-code: LlamaForCausalLM, 7,9\d\d,\d+ parameters, 30\.2 MiB", whole)
    assert re.search(r"in float32 on cpu$", lines[0])
    assert re.search(r"algorithm EAGLE3: num_steps 5, .*; draft weights .*, \d\.\d MiB of f", whole)
    slots = json.loads(done.stdout)["config"]["max_total_tokens"]
    assert f"KV pool: {slots:,} slots in pages of 16, " in whole
    assert "context 2,048 tokens, at most 8 requests at a time" in whole
    parts = r"reading the configuration \S+ s, loading weights \S+ s, .*checking the model \S+ s.*"
    assert re.fullmatch(rf"info: start: {parts}, allocating the KV pool \d+\.\d\d s", lines[-2])
    assert re.fullmatch(r"info: ready in \d+\.\d s", lines[-1])
    quiet = generate("--max-new-tokens", "2", "--json", PROMPT)
    assert quiet.stderr == ""


def test_own_settings_of_an_algorithm_are_options(tmp_path: Path) -> None:
    corpus = [tmp_path / f"{name}.txt" for name in "ab"]
    for file in corpus:
        file.write_text("import os")
    typed = "--speculative-algorithm", "NGRAM", "--ngram-index-scope", "engine"
    files = [part for file in corpus for part in ("--ngram-corpus", str(file))]
    config = report(*typed, *files, "--max-new-tokens", "4", PROMPT)["config"]
    paths = list(map(str, corpus))
    assert config["speculative_settings"] == {"ngram_index_scope": "engine", "ngram_corpus": paths}
    assert config["settings"]["ngram_index_bytes"] == 64 << 20
    assert config["settings"]["ngram_corpus"] == paths


@pytest.mark.parametrize(
    "name", ["--speculative-algorithm=NGRAM", "--speculative-algorithm=EAGLE3+NGRAM", ""]
)
def test_help_has_the_options_of_the_algorithm_that_is_named(name: str) -> None:
    done = generate(*filter(None, [name]), "--help")
    assert done.exit_code == 0
    assert ("NGRAM:\n  --ngram-index-scope" in done.stdout) is bool(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["EAGLE3", "--ngram-index-scope=engine"], "No such option '--ngram-index-scope'"),
        (["NGRAM", "--ngram-index-scope=all"], "'all' is not one of 'request', 'tenant', 'engine'"),
        (["NGRAM", "--ngram-index-bytes=0"], "0 is not in the range x>=1"),
        (["NGRAM", "--ngram-corpus=/no/file"], "ngram_corpus '/no/file' cannot be read: No such"),
    ],
)
def test_own_setting_that_cannot_be_used_is_refused(arguments: list[str], message: str) -> None:
    done = generate("--speculative-algorithm", *arguments, PROMPT)
    assert done.exit_code == 2
    assert message in done.stderr
