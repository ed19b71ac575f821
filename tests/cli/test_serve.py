"""``specplug serve`` as a command; what it serves is tested in ``tests/serve``."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specplug import LLM
from specplug.cli import main
from specplug.cli import serve as command
from specplug.cli.options import ENGINE


@pytest.fixture(autouse=True)
def errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SPECPLUG_DEBUG errors come with their traceback."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)


def serve(*arguments: str) -> Result:
    """Run the command in this process; only for what ends before a server starts."""
    return CliRunner().invoke(main, ["serve", *arguments])


def test_help_has_groups() -> None:
    text = serve("--help").output
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    of_the_engine = ["Model", "Speculation", "Engine"]
    assert headings == ["Server", "Limits", *of_the_engine, "Disaggregation", "Other"]
    for option in (*command.SERVER, *command.LIMITS, *ENGINE):
        assert option.opts[0] in text
    assert "127.0.0.1" in text


def test_every_engine_option_is_an_argument_of_llm() -> None:
    known = inspect.signature(LLM.__init__).parameters
    assert {option.name for option in ENGINE} | {"max_model_len"} <= known.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "70000 is not in the range"),
        (("--max-queue", "-1"), "-1 is not in the range"),
        (("--request-timeout", "0"), "0 is not in the range"),
        (("--max-model-len", "1"), "1 is not in the range"),
        (("--chat-template", "nowhere.jinja"), "'nowhere.jinja' does not exist"),
        (("--speculative-algorithm", "MAGIC"), "MAGIC"),
        (("--speculative-algorithm", "NONE", "--speculative-eagle-topk", "2"), "chains only"),
        (("prompt",), "unexpected extra argument"),
    ],
)
def test_bad_usage_is_told_at_once(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "specplug.serve.server", None)  # importing it fails
    done = serve(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"a\xff")
    done = serve("--chat-template", str(file))
    assert done.exit_code == 2
    assert "chat.jinja' is not UTF-8 (byte 1)" in done.stderr


@pytest.mark.parametrize("missing", ["fastapi", "zmq"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    done = serve()
    assert done.exit_code == 1
    assert done.stderr == (
        f"error: specplug serve needs {missing}, which is not installed: "
        "pip install 'specplug[serve]'\n"
    )
