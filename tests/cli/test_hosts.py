"""Other engines on the command line: what runs there, their versions, their servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specplug.registry import Registry

HOST = """
import sys

from specplug import HostCapabilities, UsageError


class Host:
    def versions(self):
        return {"engine-x": "4.2", "engine-y": None}

    def describe(self):
        return HostCapabilities(
            name="Engine X 4.2", draft_models=True, captures={"layer_inputs"}, verify=True
        )

    def server_command(self, options):
        return [sys.executable, "-c", "import sys; print(sys.argv[1:])", repr(options)]

    def open_engine(self, options):
        from specplug import LLM

        assert options.more == ("--its-own",)
        return LLM(
            options.model,
            speculative_algorithm=options.algorithm,
            speculative_num_steps=options.num_steps,
            max_running_requests=options.max_running_requests,
            seed=options.seed,
            device="cpu",
        )


algorithm = Host()
"""
INSTALLED = sorted({*Registry().names()} - {"NONE"})


@pytest.fixture
def engine(plugin_folder):
    """A host named x is installed."""
    plugin_folder.write("x", code=HOST, group="specplug.hosts")
    return plugin_folder


def said(folder, *arguments, code=0):
    done = folder.specplug(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_list_says_what_runs_in_an_engine_and_why_not(engine):
    engine.write("ODD", ("describe", "describ"))
    listed = json.loads(said(engine, "list", "--engine", "X", "--json"))
    assert listed["engine"] == "Engine X 4.2"
    found = {each["name"]: each for each in listed["algorithms"]}
    reads = "the hidden states after the final norm (capture_lm_head_input)"
    alone = "runs them for its own passes alone"
    for name in INSTALLED:
        able = Registry().select(name).info.capabilities
        lacks = []
        if able.target_drafts:
            lacks.append(f"{name} drafts with the target's own layers, and Engine X 4.2 {alone}")
        if "lm_head_input" in able.captures:
            lacks.append(f"{name} reads {reads}, and Engine X 4.2 does not give them")
        assert found[name]["obstacles"] == lacks
    assert "obstacles" not in found["ODD"]
    table = {line.split()[0]: line for line in said(engine, "list", "--engine", "x").splitlines()}
    assert " runs " in table["EAGLE3"]
    assert f" cannot run: EAGLE reads {reads}" in table["EAGLE"]
    assert "broken: " in table["ODD"]


def test_list_needs_an_engine_that_is_installed(engine):
    message = said(engine, "list", "--engine", "y", code=2)
    assert message.startswith("error: unknown engine 'y': installed are x; a host is a package")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("    def describe", "    def descrbe"), "it has no describe(); expected an object with"),
        (("= Host()", "= Host"), "it is a class; expected an object"),
        (("import sys", "import nothing_there"), "import failed: ModuleNotFoundError"),
    ],
)
def test_broken_host_is_told_in_a_line(change, message, plugin_folder):
    plugin_folder.write("x", change, code=HOST, group="specplug.hosts")
    error = said(plugin_folder, "list", "--engine", "x", code=1)
    assert message in error
    assert error.count("\n") == 1


def test_doctor_has_the_engines_versions(engine):
    report = json.loads(said(engine, "doctor", "--json"))
    assert report["versions"]["engine-x"] == "4.2"
    assert report["versions"]["engine-y"] is None
    (host,) = report["hosts"]
    assert (host["status"], host["runs"]) == ("ok", "Engine X 4.2")
    text = said(engine, "doctor")
    assert "algorithms run in x: Engine X 4.2\n" in text
    assert "engine-y      not installed" in text


def test_engine_that_was_not_tested_is_refused(plugin_folder):
    refuses = "raise UsageError('engine-x 9.9: tested with 4.2'); HostCapabilities("
    plugin_folder.write(
        "x", ("return HostCapabilities(", refuses), code=HOST, group="specplug.hosts"
    )
    error = said(plugin_folder, "list", "--engine", "x", code=2)
    assert error == "error: engine-x 9.9: tested with 4.2\n"
    assert "algorithms run in x: no: engine-x 9.9: tested with 4.2\n" in said(
        plugin_folder, "doctor"
    )


def test_doctor_reports_a_host_that_raises(plugin_folder):
    plugin_folder.write("x", ('"4.2"', "1 / 0"), code=HOST, group="specplug.hosts")
    done = plugin_folder.specplug("doctor", "--json")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["hosts"][0]["problems"]
    assert problem["what"] == "asking it raised ZeroDivisionError: division by zero"


def test_serve_becomes_the_engines_server(engine, tmp_path: Path):
    served = said(
        engine, "serve", "--engine", "x", "--speculative-algorithm", "eagle3", "--port", "8001",
        "--speculative-num-steps", "3", "--speculative-draft-model-path", str(tmp_path),
        "--", "--max-model-len", "99",
    )  # fmt: skip
    for told in (
        "algorithm='EAGLE3'",
        "num_steps=3",
        "topk=None",
        f"draft_model_path=PosixPath('{tmp_path}')",
        "address=('127.0.0.1', 8001)",
        "more=('--max-model-len', '99')",
        "assets/tiny_code'",
    ):
        assert told in served


def test_bench_measures_in_another_engine(engine):
    report = json.loads(
        said(
            engine, "bench", "--engine", "x", "--speculative-algorithms", "NGRAM:steps=3,EAGLE3",
            "--batch-sizes", "2", "--rounds", "1", "--num-prompts", "2", "--max-new-tokens", "8",
            "--seed", "5", "--json", "--", "--its-own",
        )
    )  # fmt: skip
    assert report["settings"]["in"] == "Engine X 4.2"
    found = {each["variant"]: each for each in report["results"]}
    assert set(found) == {"NONE", "NGRAM:steps=3", "EAGLE3"}
    for each in found.values():
        assert each["identical"]
        assert (each["config"]["max_running_requests"], each["config"]["seed"]) == (2, 5)
    assert found["NGRAM:steps=3"]["config"]["num_steps"] == 3


def test_bench_leaves_out_what_cannot_run_there(engine):
    error = said(
        engine, "bench", "--engine", "x", "--speculative-algorithms", "EAGLE", "--", "-x", code=2
    )
    assert "EAGLE reads the hidden states after the final norm" in error
    error = said(engine, "bench", "--engine", "x", "--page-size", "4", code=2)
    assert "--page-size: an option of the embedded engine; expected x's own options" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-queue", "3"), "--max-queue: an option of the embedded engine; expected x's own"),
        (("--speculative-algorithm", "EAGLE"), "EAGLE reads the hidden states after the final"),
        (
            ("--speculative-algorithm", "auto"),
            "speculative_algorithm='auto': Engine X 4.2 runs one algorithm alone; expected the",
        ),
        (
            ("--speculative-algorithm", "NGRAM,EAGLE3"),
            "NGRAM,EAGLE3 holds other algorithms, and Engine X 4.2 runs one alone",
        ),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4"),
            "EAGLE3 with topk=4 drafts trees, and Engine X 4.2 verifies chains only; use topk=1",
        ),
    ],
)
def test_serve_refuses_what_the_engine_cannot_do(arguments, message, engine):
    assert message in said(engine, "serve", "--engine", "x", *arguments, code=2)
