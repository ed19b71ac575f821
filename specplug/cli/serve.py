"""``specplug serve``: an OpenAI-compatible server. What it needs is imported inside the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click

from specplug.cli import say
from specplug.cli.engines import MORE, check_options, check_run, run_options
from specplug.cli.options import (
    COUNT,
    DISAGGREGATION,
    ENGINE,
    OWN,
    VERBOSE,
    Bounded,
    Duration,
    GroupedCommand,
    check_algorithm,
    chosen,
    options_of,
)
from specplug.cli.progress import loading_bars
from specplug.cli.standard_output import reserve_standard_output
from specplug.config import EngineConfig
from specplug.errors import SpecplugError
from specplug.host import ServerOptions
from specplug.registry import Registry
from specplug.serve.tool_calls import PARSERS
from specplug.settings import MAX_PORT
from specplug.speculative.automatic import select_algorithm
from specplug.text_file import read_text

_NEEDED = ("fastapi", "prometheus_client", "uvicorn", "zmq")

_SECONDS = Duration()

SERVER = (
    click.Option(
        ["--engine"],
        metavar="NAME",
        show_default="specplug's own",
        help="Another engine to serve with; its package must be installed.",
    ),
    click.Option(
        ["--host"],
        default="127.0.0.1",
        show_default=True,
        help="Address to listen at; 0.0.0.0 is reachable from other machines.",
    ),
    click.Option(
        ["--port"],
        type=click.IntRange(0, MAX_PORT),
        default=30000,
        show_default=True,
        metavar="N",
        help="Port to listen at; 0: any that is free. It is printed.",
    ),
    click.Option(
        ["--served-model-name"],
        metavar="NAME",
        show_default="--model",
        help="What clients call the model.",
    ),
    click.Option(
        ["--chat-template"],
        type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
        show_default="the tokenizer's own",
        help="Template of chats in Jinja.",
    ),
    click.Option(
        ["--tool-call-parser"],
        type=click.Choice(list(PARSERS)),
        show_default="none: tools are refused",
        help="Form in which the model writes tool calls.",
    ),
    click.Option(
        ["--per-request-spec-decode-metrics", "spec_decode_metrics"],
        type=click.Choice(["none", "summary", "detailed"]),
        default="none",
        show_default=True,
        help="What responses tell of the drafts that were accepted, in metrics.",
    ),
    click.Option(
        ["--dp-size"],
        metavar="N",
        type=Bounded("num_engines"),
        default=1,
        show_default=True,
        help="Engines: processes with requests of their own, each with a GPU if there are any.",
    ),
    click.Option(
        ["--enable-dp-attention"],
        is_flag=True,
        help="Let the engines share the model's MLPs, a part each, instead of a copy of all each.",
    ),
    click.Option(
        ["--log-requests"],
        is_flag=True,
        help="Write a line for each request to standard error; no texts.",
    ),
    VERBOSE,
)
"""Options of the address and the process."""

MODEL_LIMITS = options_of(EngineConfig, "Limits")
LIMITS = (
    click.Option(
        ["--api-key"],
        envvar="SPECPLUG_API_KEY",
        show_envvar=True,
        metavar="KEY",
        help="Key that clients must send; every path but /health asks for it.",
    ),
    *MODEL_LIMITS,
    click.Option(
        ["--max-prompt-tokens"],
        metavar="N",
        type=COUNT,
        show_default="what the context holds",
        help="Most tokens of a prompt.",
    ),
    click.Option(
        ["--max-queue"],
        metavar="N",
        type=click.IntRange(min=0),
        default=256,
        show_default=True,
        help="Most requests that wait; more are refused with status 429.",
    ),
    click.Option(
        ["--max-body-size"],
        metavar="BYTES",
        type=COUNT,
        default=4 << 20,
        show_default=True,
        help="Size of the largest request body that is taken.",
    ),
    click.Option(
        ["--request-timeout"],
        metavar="SECONDS",
        type=_SECONDS,
        default=600.0,
        show_default=True,
        help="Most time from a request's arrival to its last token.",
    ),
    click.Option(
        ["--shutdown-timeout"],
        metavar="SECONDS",
        type=_SECONDS,
        default=60.0,
        show_default=True,
        help="Time that running requests have left on SIGTERM or Ctrl-C.",
    ),
)
"""Options that limit clients."""


TOLD = "speculative_algorithm", "host", "port", "served_model_name"
"""Options that another engine's server gets, beyond those of all commands."""


@click.command(
    cls=GroupedCommand,
    params=[*SERVER, *LIMITS, *ENGINE, *DISAGGREGATION, MORE],
    headings={"Server": SERVER, "Limits": LIMITS},
)
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> None:
    """Serve a model to OpenAI's clients, until SIGTERM or Ctrl-C.

    When it is ready, its address is printed.

    With --engine another engine's own server runs the algorithm, if that engine's package is
    installed (specplug-NAME). The model, speculation, --dtype, --host, --port and
    --served-model-name are told to it; its own options follow after `--`.
    """
    check_options(ctx, options["engine"], TOLD)
    if options["engine"] is not None:
        _serve_elsewhere(options)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SpecplugError(
            f"specplug serve needs {', '.join(missing)}, which is not installed: "
            "pip install 'specplug[serve]'"
        )
    config = EngineConfig(**chosen((*ENGINE, OWN, *DISAGGREGATION, *MODEL_LIMITS), options))
    with reserve_standard_output():
        registry = Registry()
        check_algorithm(registry, config)
        registry.check_extensions(config.disable_extensions)
    template = options["chat_template"]
    chat_template = None if template is None else read_text("chat template", template)
    import asyncio

    from specplug.serve.limits import Limits
    from specplug.serve.server import Server, Settings

    settings = Settings(
        config=config,
        host=options["host"],
        port=options["port"],
        served_model_name=options["served_model_name"] or str(config.model),
        chat_template=chat_template,
        tool_call_parser=options["tool_call_parser"],
        spec_decode_metrics=options["spec_decode_metrics"],
        max_prompt_tokens=options["max_prompt_tokens"],
        max_queue=options["max_queue"],
        shutdown_timeout=options["shutdown_timeout"],
        dp_size=options["dp_size"],
        enable_dp_attention=options["enable_dp_attention"],
        limits=Limits(
            max_body_bytes=options["max_body_size"],
            request_timeout=options["request_timeout"],
            api_key=options["api_key"],
        ),
        log_requests=options["log_requests"],
        verbose=options["verbose"],
    )
    with ExitStack() as loading:
        bars = loading_bars(f"loading {config.model}", lines=options["verbose"])
        server = Server(
            settings,
            on_loading=loading.enter_context(bars),
            on_loaded=loading.close,
            on_listening=_announce,
            on_warning=lambda message: say("warning", message),
        )
        asyncio.run(server.run())


def _serve_elsewhere(options: Mapping[str, Any]) -> NoReturn:
    """Become the server of another engine.

    Raises:
        SpecplugError: that engine is not installed, or cannot do what is asked.
    """
    settings = attrs.fields_dict(EngineConfig)
    config = EngineConfig(**{name: options[name] for name in options if name in settings})
    with reserve_standard_output():
        registry = Registry()
        host = registry.host(options["engine"])
        selected, _ = select_algorithm(registry, config, host=host.describe())
        check_run(host, selected, config)
        command = host.server_command(
            ServerOptions(
                **run_options(config, selected.name, options["more"]),
                address=(options["host"], options["port"]),
                served_model_name=options["served_model_name"],
            )
        )
    sys.stdout.flush()
    os.execvp(command[0], [*command])


def _announce(address: str) -> None:
    click.echo(f"listening on {address}")
