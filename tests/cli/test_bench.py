"""``specplug bench`` on the default model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import attrs
import pytest
from click.testing import CliRunner, Result
from warm_process import written_to_terminal

from specplug import LLM
from specplug.cli import bench as command
from specplug.cli import main
from specplug.registry import Registry

QUICK = "--rounds", "1", "--num-prompts", "1", "--batch-sizes", "1", "--max-new-tokens", "8"
PLOTS = {"speedup.png", "acceptance.png", "nodes.png", "time_split.png", "reliability.png"}


REPEAT = '''
import specplug


class Algorithm:
    """Drafts the same token again."""

    @specplug.hookimpl
    def describe(self):
        return specplug.AlgorithmInfo(
            name="NAME", summary="Again", api_version=1, defaults=specplug.Defaults(num_steps=2)
        )

    @specplug.hookimpl
    def create_worker(self, runtime):
        return self

    @specplug.hookimpl
    def build_draft_input(self, runtime, batch, target_output):
        return specplug.DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(self, runtime, batch, draft_input):
        roots = draft_input.bonus_tokens.unsqueeze(1)
        return specplug.Draft.chain(roots.repeat(1, runtime.config.num_draft_tokens))


algorithm = Algorithm()
'''


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    """Under SPECPLUG_DEBUG errors come with their traceback."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)


def bench(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def told(done: Result) -> str:
    """Standard error without the lines of progress."""
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("progress: "))


def failure(*arguments: object) -> tuple[int, str]:
    """Exit code and message of a run that fails; nothing is on standard output."""
    done = bench(*arguments)
    assert done.stdout == ""
    (line,) = told(done).splitlines()
    assert line.startswith("error: ")
    return done.exit_code, line.removeprefix("error: ")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run with everything: what it printed, and the folder it wrote."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    done = bench(
        *("--speculative-algorithms", "ngram", "--speculative-algorithms", "EAGLE3:steps=2,topk=2"),
        *("--batch-sizes", "2,1", "--rounds", "2", "--num-prompts", "2"),
        *("--max-new-tokens", "12", "--ignore-eos", "--page-size", "4", "--output", folder),
    )
    assert done.exit_code == 0, done.output
    return done, folder


LABELS = {"NONE", "NGRAM", "EAGLE3:steps=2,topk=2"}


def test_tables_in_a_pipe(measured):
    done, _ = measured
    speed, times, nodes, acceptance, scores, words = done.stdout.split("\n\n")
    heading, *rows = speed.splitlines()
    assert " ".join(heading.split()) == (
        "ALGORITHM BATCH S K N TOKENS/S SPEED-UP RANGE ACCEPT LENGTH IDENTICAL"
    )
    assert [row.split()[1] for row in rows] == ["1"] * 3 + ["2"] * 3
    assert {row.split()[0] for row in rows} == LABELS
    assert rows[0].startswith("NONE ")
    assert rows[3].startswith("NONE ")
    assert all(row.endswith("  yes") for row in rows)
    assert len(times.splitlines()) == 7
    heading = " ".join(times.splitlines()[0].split())
    assert heading == "ALGORITHM BATCH MS/TOKEN PROPOSE TARGET VERIFY EXTEND PREFILL OTHER"
    heading = " ".join(nodes.splitlines()[0].split())
    assert heading == "ALGORITHM BATCH DRAFTED VERIFIED ACCEPTED WASTED"
    heading, *rows = acceptance.splitlines()
    assert heading.split("  ")[-1].startswith("POS ")
    assert [row.split()[2] for row in rows] == ["reach", "accepted"] * 4
    heading, *rows = scores.splitlines()
    assert " ".join(heading.split()) == ("ALGORITHM BATCH PREDICTED ACCEPTED ERROR RELIABILITY")
    assert {row.split()[0] for row in rows} == LABELS - {"NONE"}
    assert all(len(row.split()[-1]) == 10 for row in rows)
    assert (
        "greedy, at most 12 new tokens per prompt, page size 4; 2 rounds of 2 prompts of" in words
    )
    assert "\x1b" not in done.stdout
    assert all(name in told(done) for name in {"bench.json", *PLOTS})


def test_progress_without_a_terminal_is_a_line_a_round(measured):
    done, _ = measured
    lines = [line for line in done.stderr.splitlines() if line.startswith("progress: ")]
    said = [re.sub(r" after \d+ s", "", line.removeprefix("progress: ")) for line in lines]
    assert [line.split(": ")[1:] for line in said] == [
        [f"batch {size}", what]
        for size in (1, 2)
        for what in ("loading 3 algorithms", "round 1 of 2", "round 2 of 2")
    ]
    shares = [int(line.split()[0]) for line in said]
    assert shares == sorted(shares)
    assert shares[-1] > 50


def test_bench_without_a_terminal_is_never_silent(monkeypatch):
    monkeypatch.setattr("specplug.cli.progress.LINE_SECONDS", 0.05)
    generate = LLM.generate

    def slow(llm, *args, **kwargs):
        time.sleep(0.2)
        return generate(llm, *args, **kwargs)

    monkeypatch.setattr(LLM, "generate", slow)
    done = bench("--speculative-algorithms", "NGRAM", *QUICK)
    lines = [line for line in done.stderr.splitlines() if "round 1 of 1: " in line]
    for name in ("NONE", "NGRAM"):
        assert sum(line.endswith(f"{name}, batch 1") for line in lines) > 1


def test_json_file(measured):
    _, folder = measured
    report = json.loads((folder / "bench.json").read_text())
    keys = {"settings", "machine", "versions", "notes", "problems", "results"}
    assert (set(report), report["notes"], report["problems"]) == (keys, [], [])
    settings = report["settings"]
    assert settings["model"] == "tiny-code"
    assert (settings["dtype"], settings["device"]) == ("float32", "cpu")
    assert (settings["rounds"], settings["batch_sizes"], settings["num_prompts"]) == (
        *(2, [1, 2]),
        [2, 2],
    )
    assert settings["sampling"]["max_tokens"] == 12
    assert settings["engine"]["page_size"] == 4
    assert report["machine"]["cpu"]
    assert report["machine"]["threads"] >= 1
    assert {"python", "specplug", "torch", "specplug-ngram"} <= set(report["versions"])
    results = report["results"]
    assert {(r["variant"], r["batch_size"]) for r in results} == {
        (label, size) for label in LABELS for size in (1, 2)
    }
    for result in results:
        check_result(result)
    tree = next(r for r in results if r["algorithm"] == "EAGLE3")
    config = tree["config"]
    assert (config["num_steps"], config["topk"], config["max_running_requests"]) == (2, 2, 1)
    assert config["page_size"] == 4
    assert len(tree["drafted_by_position"]) == 2


def check_result(result):
    """Of one variant at one batch size."""
    assert result["identical"] is True
    assert result["differences"] == []
    assert len(result["rounds"]) == 2
    for each in result["rounds"]:
        assert each["output_tokens"] == 24, "--ignore-eos"
        assert each["tokens_per_second"] == pytest.approx(24 / each["seconds"])
        assert each["statistics"]["requests"] == {"length": 2}, "only this round's"
    rates = [each["tokens_per_second"] for each in result["rounds"]]
    assert result["tokens_per_second"]["median"] == pytest.approx(sum(rates) / 2)
    seconds = result["seconds"]
    wall = sum(each["seconds"] for each in result["rounds"])
    assert seconds["wall"] == pytest.approx(wall)
    parts = [seconds[part] for part in ("draft", "verify", "prefill", "other")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(wall)
    drafts = result["algorithm"] != "NONE"
    assert bool(result["acceptance_by_position"]) is drafts
    assert all(0 <= rate <= 1 for rate in result["acceptance_by_position"])
    assert result["mean_accept_length"] >= 1
    assert bool(result["reliability"]) is drafts
    scored = sum(each["nodes"] for each in result["reliability"].values())
    assert scored == sum(each["statistics"]["drafted"] for each in result["rounds"])
    assert drafts or set(result["speed_up"].values()) == {1.0}


def test_plots_are_written(measured):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    _, folder = measured
    assert {file.name for file in folder.iterdir()} == {"bench.json", *PLOTS}
    assert {imread(folder / name).shape[1] for name in PLOTS} == {1360}


def test_json_to_standard_output_and_what_reaches_the_engine(tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "import os"}\n{"prompt": [5, 6, 7]}\n')
    done = bench(
        *("--json", "--speculative-algorithms", "EAGLE3", "--dataset", dataset, *QUICK),
        *("--temperature", "1", "--seed", "3", "--dtype", "float64", "--device", "cpu"),
        *("--speculative-num-steps", "2", "--speculative-eagle-topk", "2"),
        *("--speculative-num-draft-tokens", "4", "--disable-overlap-schedule"),
        *("--chunked-prefill-size", "-1", "--max-total-tokens", "300", "--num-threads", "1"),
    )
    assert (done.exit_code, told(done)) == (0, "")
    report = json.loads(done.stdout)
    none, mine = report["results"]
    expected = {
        "num_steps": 2,
        "topk": 2,
        "num_draft_tokens": 4,
        "overlap": "off: disable_overlap_schedule",
        "chunked_prefill_size": None,
        "max_running_requests": 1,
        "dtype": "float64",
    }
    assert expected.items() <= mine["config"].items()
    assert none["config"]["num_draft_tokens"] == 1, "plain decoding is as always"
    assert report["settings"]["dataset"] == str(dataset)
    assert report["settings"]["sampling"]["temperature"] == 1
    assert mine["rounds"][0]["statistics"]["prompt_tokens"] == 3, "the first warmed up"
    assert mine["identical"] is True


@pytest.mark.parametrize("workload", ["editing", "agent", "noise", "mixed"])
def test_every_workload_gives_the_tokens_of_none(workload):
    done = bench(
        *("--workload", workload, "--speculative-algorithms", "NGRAM", "--json", "--rounds", "1"),
        *("--batch-sizes", "4", "--num-prompts", "4", "--max-new-tokens", "8"),
    )
    assert (done.exit_code, told(done)) == (0, "")
    report = json.loads(done.stdout)
    assert report["settings"]["workload"] == workload
    assert report["settings"]["sampling"]["temperature"] == (4.0 if workload == "noise" else 0.0)
    assert all(result["identical"] for result in report["results"])


def test_several_algorithms_are_one_variant(tmp_path):
    done = bench(
        *("--speculative-algorithms", "[NGRAM,EAGLE3:steps=2],auto", "--output", tmp_path),
        *("--rounds", "1", "--num-prompts", "2", "--batch-sizes", "2", "--max-new-tokens", "24"),
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "bench.json").read_text())
    results = {each["variant"]: each for each in report["results"]}
    assert set(results) == {"NONE", "[NGRAM,EAGLE3:steps=2]", "auto"}
    assert results["auto"]["config"]["algorithm"].startswith("NGRAM,")
    assert {"specplug-ngram", "specplug-eagle3"} <= set(report["versions"])
    for name, found in results.items():
        shares = [each["share"] for each in found["drafters"].values()]
        (run,) = found["rounds"]
        choices = run["statistics"].get("choices", [])
        assert bool(choices) == bool(shares) == (name != "NONE")
        assert sum(shares) == pytest.approx(1.0 if shares else 0.0)
        requests = sum(sum(step["drafters"].values()) for step in choices)
        assert requests >= run["statistics"]["verifications"] or name == "NONE"
    assert "DRAFTER" in done.stdout
    assert "auto, batch 2: speculation: " in done.stdout
    assert (tmp_path / "choices.png").exists()


def test_prompts_that_come_again_are_told(tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "import os"}\n')
    done = bench("--speculative-algorithms", "none", "--dataset", dataset, *QUICK)
    assert done.exit_code == 0
    assert told(done).startswith("warning: at batch 1 prompts came more than once: an algorithm")


def test_all(plugin_folder, monkeypatch):
    plugin_folder.write("ABSENT", ("from", "import nothing_there\nfrom"))
    plugin_folder.write("CRASHING", ("return self", "raise KeyError('slot')"))
    plugin_folder.write("OFF", ("from", "raise AssertionError('imported')\nfrom"))
    others = {name for name in Registry().names() if name not in ("NGRAM", "NONE")}
    off = ",".join(others - {"ABSENT", "CRASHING"})
    monkeypatch.setenv("SPECPLUG_DISABLE", off)
    done = bench("--json", *QUICK, "--batch-sizes", "1,2", "--num-prompts", "2")
    report = json.loads(done.stdout)
    assert done.exit_code == 0, "the user did not name them"
    assert [r["variant"] for r in report["results"] if r["variant"] != "NONE"] == ["NGRAM"] * 2
    absent, crashing = told(done).splitlines()
    assert absent.startswith("warning: ABSENT: left out: algorithm ABSENT (specplug-absent 1.0, ")
    assert "No module named 'nothing_there'" in absent
    assert crashing.startswith(
        "warning: CRASHING, batch 1: left out: algorithm CRASHING (specplug-"
    )
    assert "create_worker() raised KeyError: 'slot'" in crashing
    assert [(p["variant"], p["skipped"]) for p in report["problems"]] == [
        ("ABSENT", True),
        ("CRASHING", True),
    ]
    code, line = failure("--speculative-algorithms", "all,ABSENT", *QUICK)
    assert (code, "import failed: ModuleNotFoundError" in line) == (1, True)
    code, line = failure("--speculative-algorithms", "CRASHING", *QUICK)
    assert (code, "create_worker() raised KeyError: 'slot'" in line) == (1, True)
    code, line = failure("--speculative-algorithms", sorted(others)[-1], *QUICK)
    assert (code, "it is disabled by SPECPLUG_DISABLE" in line) == (1, True)


def test_a_plugin_that_fails_while_it_is_measured(plugin_folder):
    plugin_folder.write("FAILING")  # its hooks raise NotImplementedError
    done = bench("--speculative-algorithms", "FAILING,NGRAM", *QUICK)
    assert done.exit_code == 1
    assert told(done).startswith(
        "error: FAILING, batch 1: failed: algorithm FAILING (specplug-failing"
    )
    assert "build_draft_input() raised NotImplementedError" in told(done)
    rows = done.stdout.partition("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["NONE", "NGRAM"]


def test_without_draft_weights_for_this_model(shallow, monkeypatch):
    monkeypatch.setattr("specplug.cli.bench.Registry.entries", one_of_each)
    model = "--model", shallow.path
    done = bench(*model, *QUICK)
    assert done.exit_code == 0
    assert told(done).startswith("warning: EAGLE3, batch 1: left out: EAGLE3 needs draft weights")
    assert told(done).count("\n") == 1
    code, line = failure(*model, "--speculative-algorithms", "EAGLE3", *QUICK)
    assert (code, "EAGLE3 needs draft weights for this target" in line) == (2, True)
    weights = shallow.drafts["EAGLE3"]
    named = ("--speculative-draft-model-path", weights), ("--speculative-algorithms", "all")
    done = bench(*model, *QUICK, "--json", *named[0], *named[1])
    assert (done.exit_code, told(done)) == (0, "")
    assert len(json.loads(done.stdout)["results"]) == 3
    done = bench(*model, *QUICK, "--speculative-algorithms", f"EAGLE3:draft={weights}")
    assert done.exit_code == 0


def one_of_each(self, entries=Registry.entries):
    """Of the installed algorithms, one with a draft model and one without."""
    return [entry for entry in entries(self) if entry.name in ("EAGLE3", "NGRAM", "NONE")]


def test_outputs_that_differ(plugin_folder, monkeypatch):
    """No plugin can make a token wrong, so the run itself is made to."""
    plugin_folder.write("WRONG", code=REPEAT)
    generate = LLM.generate

    def repeat_first(llm, *args, **kwargs):
        outputs = generate(llm, *args, **kwargs)
        if llm.effective_config["speculative_algorithm"] != "WRONG":
            return outputs
        return [attrs.evolve(each, token_ids=each.token_ids[:1] * 8) for each in outputs]

    monkeypatch.setattr(LLM, "generate", repeat_first)
    done = bench("--speculative-algorithms", "WRONG,NGRAM", *QUICK)
    assert done.exit_code == 1
    rows = [line.split() for line in done.stdout.partition("\n\n")[0].splitlines()[1:]]
    assert {row[0]: row[-1] for row in rows} == {"NONE": "yes", "WRONG": "NO", "NGRAM": "yes"}
    assert told(done) == (
        "error: WRONG, batch 1: 1 of 1 outputs are not NONE's, the first at round 1, prompt 1, "
        "output token 2\n"
    )


@pytest.fixture
def no_engine(monkeypatch):
    """Importing it fails."""
    for module in ("specplug.llm", "specplug.bench.measurement"):
        monkeypatch.setitem(sys.modules, module, None)


BAD_USAGE = [
    (("--speculative-algorithms", "NGRM"), "unknown algorithm 'NGRM': did you mean NGRAM? instal"),
    (("--speculative-algorithms", "NGRAM:step=1"), "NGRAM:step=1: did you mean steps? expected"),
    (("--speculative-algorithms", "CHAIN:topk=2"), "topk=2: CHAIN drafts chains only"),
    (("--speculative-algorithms", "NGRAM:draft=x"), "speculative_draft_model_path='x': NGRAM has"),
    (
        ("--speculative-algorithms", "CHAIN", "--speculative-eagle-topk", "2"),
        "topk=2: CHAIN drafts chains only",
    ),
    (("--batch-sizes", "1,x"), "Invalid value for '--batch-sizes': '1,x' is no list of integers"),
    (("--batch-sizes", "0"), "Invalid value for '--batch-sizes': '0' is no list of integers"),
    (("--batch-sizes", ","), "Invalid value for '--batch-sizes': ',' is no list of integers"),
    (("--num-prompts", "4"), "num_prompts=4 does not fill a batch of 8; expected at least 8"),
    (("--rounds", "0"), "Invalid value for '--rounds': 0 is not in the range x>=1"),
    (("--dataset", "gone.jsonl"), "dataset 'gone.jsonl' cannot be read: No such file"),
    (("--dataset", "/"), "Invalid value for '--dataset': File '/' is a directory"),
    (("--output", "/dev/null"), "--output '/dev/null' cannot be made: File exists"),
    (("--output", "/dev/null/x"), "--output '/dev/null/x' cannot be made: Not a directory"),
    (("--temperature", "-1"), "temperature=-1.0: expected a number from 0 to 1000000"),
    (("--max-running-requests", "2"), "No such option '--max-running-requests'"),
    (("prompt",), "Got unexpected extra argument (prompt)"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE, ids=range(len(BAD_USAGE)))
def test_bad_usage_is_told_before_a_model_loads(arguments, message, plugin_folder, no_engine):
    plugin_folder.write("CHAIN")
    code, line = failure(*arguments)
    assert line.startswith(message)
    assert code == 2


def test_bad_dataset(tmp_path, no_engine):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "x"}\n{"promt": "x"}\n')
    code, line = failure("--dataset", dataset)
    assert (code, f"dataset {str(dataset)!r}, line 2: it has no prompt; expected" in line) == (
        *(2, True),
    )
    dataset.write_text("\n")
    code, line = failure("--dataset", dataset)
    assert (code, "has no prompt; expected {" in line) == (2, True)


def test_too_long_a_prompt(tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(f'{{"prompt": "x"}}\n{json.dumps({"prompt": "x = 1 " * 2000})}\n')
    code, line = failure("--dataset", dataset, "--speculative-algorithms", "none", *QUICK)
    assert (code, line.startswith("dataset line 2: the prompt has ")) == (2, True)


def test_without_matplotlib(tmp_path, monkeypatch, no_engine):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, line = failure("--output", tmp_path / "new")
    assert code == 1
    assert line == '--output draws plots, which needs matplotlib: pip install "specplug[bench]"'
    assert not (tmp_path / "new").exists()


def test_without_output_matplotlib_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--speculative-algorithms", "none", *QUICK).exit_code == 0


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root writes everywhere")
def test_output_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    code, line = failure("--output", tmp_path)
    assert (code, "nothing may be written there" in line) == (2, True)


def test_missing_model():
    code, line = failure("--model", "/no/such/folder", *QUICK)
    assert (code, line.startswith("model '/no/such/folder': no such folder")) == (1, True)


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["list"], ["bench", "--rounds", "0"]])
def test_nothing_heavy_is_imported_at_the_start(arguments):
    script = (
        "import sys, specplug.cli\n"
        f"try: specplug.cli.main({arguments})\n"
        "finally:\n"
        "  heavy = {'torch', 'matplotlib', 'rich', 'transformers'} & set(sys.modules)\n"
        "  print(heavy, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "set()"


def test_options_that_are_shared_are_those_of_generate():
    names = {option.name for option in (*command.SPECULATION, *command.SHARED)}
    left_out = {option.name for option in command.ENGINE} - names
    assert left_out == {"speculative_algorithm", "max_running_requests"}
    assert len(command.SPECULATION) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal():
    environment = {k: v for k, v in os.environ.items() if k != "SPECPLUG_DEBUG"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    said = written_to_terminal(["bench", "--speculative-algorithms", "NGRAM", *QUICK], environment)
    assert "round 1 of 1: NGRAM, batch 1" in said
    assert "━" in said, "a progress bar"
    assert "0:00:00" in said, "the remaining time"
    assert "\x1b[1;36mNGRAM" in said
