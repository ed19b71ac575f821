"""``specplug generate``: complete prompts under an algorithm. torch loads inside the command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attrs
import click

from specplug.cli.options import (
    ENGINE,
    EXTENSIONS,
    GRAMMAR,
    OWN,
    SAMPLING,
    VERBOSE,
    GroupedCommand,
    check_algorithm,
    chosen,
)
from specplug.cli.progress import load, told
from specplug.cli.standard_output import reserve_standard_output
from specplug.config import EngineConfig
from specplug.errors import SpecplugError, UsageError
from specplug.registry import Registry
from specplug.text_file import decode_text, read_text

if TYPE_CHECKING:
    from specplug.llm import LLM
    from specplug.outputs import RequestOutput
    from specplug.sampling_params import SamplingParams


SOURCES = (
    click.Option(
        ["--prompt-file"],
        type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
        help="Text file with one prompt per line; empty lines are left out.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    click.Argument(["prompts"], nargs=-1, metavar="PROMPT..."),
)


@attrs.frozen
class Run:
    """The outputs, and the time that they took."""

    outputs: Sequence[RequestOutput]
    seconds: float
    load_seconds: float
    config: Mapping[str, Any]
    stats: Mapping[str, Any]

    def totals(self) -> dict[str, Any]:
        """Return the counts over all prompts for ``--json``. Keys are only ever added."""
        accepted = [n for output in self.outputs for n in output.accept_lens]
        tokens = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompts": len(self.outputs),
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in self.outputs),
            "output_tokens": tokens,
            "decode_steps": len(accepted),
            "mean_accept_length": sum(accepted) / len(accepted) if accepted else None,
            "seconds": self.seconds,
            "load_seconds": self.load_seconds,
            "tokens_per_second": tokens / self.seconds,
        }

    def as_mapping(self) -> dict[str, Any]:
        """Return what ``--json`` prints. Keys are only ever added."""
        draft = self.config["draft_model_path"]
        return {
            "results": [
                {
                    "prompt": output.prompt,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "accept_lens": output.accept_lens,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "cached_tokens": output.num_cached_tokens,
                }
                for output in self.outputs
            ],
            "totals": self.totals(),
            "stats": self.stats,
            "config": {**self.config, "draft_model_path": None if draft is None else str(draft)},
        }


@click.command(
    cls=GroupedCommand,
    params=[*SOURCES, *ENGINE, *SAMPLING, *GRAMMAR, VERBOSE],
    headings={"Prompts and output": SOURCES},
    takes_extensions=True,
)
def generate(**options: Any) -> None:
    """Complete each PROMPT; a dash reads one from standard input.

    The text goes to standard output, statistics to standard error.
    """
    from specplug.sampling_params import SamplingParams

    params = SamplingParams(**chosen((*SAMPLING, *GRAMMAR), options))
    with told(verbose=options["verbose"]), reserve_standard_output() as out:
        if options["as_json"]:
            import json

            run = _generate(options, params, None)
            click.echo(json.dumps(run.as_mapping()), file=out)
            return
        run = _generate(options, params, out)
    if len(run.outputs) > 1:
        _print_completions(run.outputs)
    _print_statistics(run)


def _generate(options: Mapping[str, Any], params: SamplingParams, out: TextIO | None) -> Run:
    """Complete the prompts; one alone is printed on ``out`` as it comes, if that is given."""
    config = EngineConfig(**chosen((*ENGINE, OWN, EXTENSIONS), options))
    registry = Registry()
    check_algorithm(registry, config)
    registry.check_extensions(config.disable_extensions)
    prompts = _read_prompts(options["prompts"], options["prompt_file"])
    started = time.perf_counter()
    with load(config) as llm:
        loaded = time.perf_counter()
        if len(prompts) == 1 and out is not None:
            outputs = [_stream(llm, prompts[0], params, out)]
        else:
            with _progress(len(prompts)) as advance:
                outputs = llm.generate(prompts, params, on_finished=advance)
        seconds = time.perf_counter() - loaded
        return Run(outputs, seconds, loaded - started, llm.effective_config, llm.stats())


def _read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    if arguments.count("-") > 1:
        raise UsageError("prompt '-' stands more than once; standard input can be read only once")
    prompts = [_standard_input() if prompt == "-" else prompt for prompt in arguments]
    if file is not None:
        lines = read_text("prompt file", file).replace("\r\n", "\n").split("\n")
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise UsageError(f"prompt file {str(file)!r} has no prompt; expected one per line")
    if not prompts:
        raise UsageError(
            "no prompt was given; expected PROMPT arguments, - for standard input, or --prompt-file"
        )
    return prompts


def _standard_input() -> str:
    text = decode_text("standard input", sys.stdin.buffer.read())
    if not text:
        raise UsageError("standard input is empty; expected a prompt")
    return text


@contextmanager
def _progress(count: int) -> Iterator[Callable[[RequestOutput], None] | None]:
    """Show a progress bar over many prompts on standard error, if that is a terminal."""
    if count == 1 or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=count)

        def advance(output: RequestOutput) -> None:
            progress.advance(task)

        yield advance


def _stream(llm: LLM, prompt: str, params: SamplingParams, out: TextIO) -> RequestOutput:
    """Print the completion as it comes; on a terminal after its prompt."""
    shown = ""
    with closing(llm.stream(prompt, params)) as outputs:
        try:
            for output in outputs:
                if not shown and out.isatty():
                    click.secho(prompt, nl=False, dim=True, file=out)
                click.echo(output.delta, nl=False, file=out)
                shown = prompt + (output.text or "")
        finally:
            if shown and not shown.endswith("\n"):
                with suppress(BrokenPipeError):
                    click.echo(file=out)
    return _sound(output)


def _print_completions(outputs: Sequence[RequestOutput]) -> None:
    """Print each completion; on a terminal under a heading and after its prompt."""
    on_terminal = sys.stdout.isatty()
    for number, output in enumerate(outputs, 1):
        text = _sound(output).text or ""
        if on_terminal:
            lead = "\n" if number > 1 else ""
            click.secho(f"{lead}prompt {number} of {len(outputs)}", bold=True, fg="cyan")
            click.secho(output.prompt or "", nl=False, dim=True)
        click.echo(text, nl=not text.endswith("\n"))


def _print_statistics(run: Run) -> None:
    totals, config = run.totals(), run.config
    accepted = totals["mean_accept_length"]
    parts = [
        f"{totals['output_tokens']} tokens in {run.seconds:.2f} s",
        f"{totals['tokens_per_second']:.1f} tokens/s",
        f"mean accept length {'-' if accepted is None else f'{accepted:.2f}'}",
        f"{config['algorithm']} with num_steps {config['num_steps']}, topk {config['topk']}, "
        f"num_draft_tokens {config['num_draft_tokens']}",
    ]
    click.secho(", ".join(parts), dim=True, err=True)
    if run.stats["speculation"] is not None:
        from specplug.engine.speculation import speculation_line

        click.secho(speculation_line(run.stats["speculation"]), dim=True, err=True)


def _sound(output: RequestOutput) -> RequestOutput:
    if output.finish_reason == "error":
        raise SpecplugError(f"prompt {output.request_id}: {output.error}")
    return output
