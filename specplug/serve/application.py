"""The routes of the API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from specplug import __version__
from specplug.errors import UsageError, shown
from specplug.sampling_params import SamplingParams
from specplug.serve.api_errors import APIError, bad_request, invalid, timed_out, unavailable
from specplug.serve.engine_client import RequestStream
from specplug.serve.limits import Limits, LimitsMiddleware, error_response
from specplug.serve.metrics import Counted, Metrics, Stopwatch
from specplug.serve.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorResponse,
    FlushRequest,
    Health,
    Model,
    ModelList,
)
from specplug.serve.ranks import Ranks
from specplug.serve.replies import ChatReply, CompletionReply, Reply
from specplug.serve.sampling import sampling_params
from specplug.serve.tool_choice import ToolUse, tool_use
from specplug.serve.wishes import HEADERS, PARAMETERS, blamed_on_header, read_wishes

_T = TypeVar("_T")

_STATS_SECONDS = 2.0
"""How long metrics wait for an engine in a long step; then the last ones are returned, as they are
after an engine's end."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served"},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve"},
}


def _or_stream(what: str) -> dict[int | str, dict[str, Any]]:
    data = {"type": "string", "description": "A chunk as JSON; [DONE] at the end; or an error"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    content = {"text/event-stream": {"schema": event}}
    return {**_ERRORS, 200: {"description": f"{what}, or its stream", "content": content}}


class ClientGone(Exception):
    """The client has gone away and waits no more for the response."""


class EventStream(StreamingResponse):
    """A stream as server-sent events, which ends when the response does."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], stream: RequestStream) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI defines it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


class OpenAIServing:
    """Takes requests of the API and answers them.

    Args:
        ranks: the engines.
        limits: of what clients may do.
        model: the name under which the model is served.
        metrics: where times go.
        tool_call_parser: the form in which the model writes tool calls, if it is known.
        spec_decode_metrics: how much responses tell of what verifications accepted.

    Attributes:
        draining: whether no more requests are taken.
    """

    def __init__(
        self,
        ranks: Ranks,
        limits: Limits,
        model: str,
        metrics: Metrics,
        tool_call_parser: str | None = None,
        spec_decode_metrics: str = "none",
    ) -> None:
        self._spec_decode_metrics = spec_decode_metrics
        self._tool_call_parser = tool_call_parser
        self.draining = False
        self.model = model
        self.ranks = ranks
        self.metrics = metrics
        self._limits = limits
        self._created = int(time.time())

    @property
    def models(self) -> list[Model]:
        """The model's entry of ``/v1/models``."""
        length = self.ranks.context_len
        return [Model(id=self.model, created=self._created, max_model_len=length)]

    @property
    def health(self) -> Health:
        """Whether the server takes requests."""
        if self.ranks.failed:
            return Health(status="failed")
        return Health(status="draining" if self.draining else "ok")

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name is not None and name != self.model:
            raise APIError(
                404,
                f"model {shown(name)} is not served here; expected {self.model!r} (GET /v1/models)",
                param="model",
                code="model_not_found",
            )

    def _check_lengths(self, prompts: list[str | list[int]]) -> None:
        """Refuse token ids that no context holds before any code reads them one by one."""
        most = self.ranks.context_len - 1
        longest = max((len(p) for p in prompts if isinstance(p, list)), default=0)
        if longest > most:
            raise APIError(
                400, f"the prompt has {longest} tokens; expected at most {most}", param="prompt"
            )

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        self._check_lengths(body.prompts)
        reply = CompletionReply(body, self.model)
        return await self._answer(
            body,
            request,
            reply,
            size=len(body.prompts) * body.num_choices,
            prompts=body.prompts,
            echo=bool(body.echo),
        )

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        tools = tool_use(body, self._tool_call_parser)
        told = {} if tools is None else {"tools": tools.told}
        try:
            return await self._answer(
                body,
                request,
                ChatReply(body, self.model, tools),
                tools,
                size=body.num_choices,
                messages=[message.for_template() for message in body.messages],
                template_options={**(body.chat_template_kwargs or {}), **told},
            )
        except APIError as error:
            if error.param == "structural_tag":  # what was made of the tools
                error.param = "tools"
            raise

    async def flush(self, cache_salt: str | None) -> None:
        """Answer ``/flush_cache``."""
        try:
            SamplingParams(cache_salt=cache_salt)
        except UsageError as error:
            raise bad_request(str(error)) from error
        await self.ranks.flush(cache_salt)

    async def stats(self) -> None:
        """Ask the engines for the statistics of the metrics."""
        engines = self.metrics.engines
        engines.algorithms = [ready.algorithm for ready in self.ranks.ready]
        self.metrics.open_requests.set(self.ranks.num_open)
        with suppress(TimeoutError, APIError):
            engines.stats = await asyncio.wait_for(self.ranks.stats(), _STATS_SECONDS)

    async def _answer(
        self,
        body: CompletionRequest | ChatRequest,
        request: Request,
        reply: Reply,
        tools: ToolUse | None = None,
        **fields: Any,
    ) -> Response:
        if self.draining:
            raise unavailable("the server is shutting down and takes no more requests")
        if self.ranks.prefills_for_others:
            raise APIError(
                400,
                "this is a prefill instance: it serves decode instances alone; send requests to "
                "one of these",
                code="prefill_instance",
            )
        self.check_model(body.model)
        reply.spec_decode_metrics = self._spec_decode_metrics
        stopwatch = Stopwatch(self.metrics)
        wishes = read_wishes(request.headers, {name: getattr(body, name) for name in HEADERS})
        stream = self.ranks.submit(
            params=sampling_params(body, tools, wishes).as_json(),
            priority=body.priority or 0,
            **fields,
        )
        seconds = self._limits.request_timeout
        stream.fail_after(seconds, timed_out(seconds))
        try:
            reply.accept(await _unless_gone(request.receive, stream.accepted()))
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return EventStream(_events(stream, reply, stopwatch, bool(usage)), stream)
            await _unless_gone(request.receive, _collect(stream, reply, stopwatch))
        except APIError as error:
            stream.close()
            raise blamed_on_header(error, wishes) from error
        except BaseException:
            stream.close()
            raise
        return Response(reply.whole().model_dump_json(), media_type="application/json")


async def _collect(stream: RequestStream, reply: Reply, stopwatch: Stopwatch) -> None:
    async for update in stream:
        stopwatch.lap(update)
        reply.add(update)


async def _events(
    stream: RequestStream, reply: Reply, stopwatch: Stopwatch, usage: bool
) -> AsyncIterator[str]:
    try:
        for chunk in reply.begin():
            yield _event(chunk.model_dump_json())
        async for update in stream:
            stopwatch.lap(update)
            added = reply.add(update)
            if added is not None:
                yield _event(added.model_dump_json())
        if usage:
            yield _event(reply.end().model_dump_json())
        yield _event("[DONE]")
    except APIError as error:
        yield _event(error.body().decode())


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for ``work``, as long as the client does.

    Raises:
        ClientGone: it went away.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def create_application(serving: OpenAIServing, limits: Limits) -> ASGIApp:
    """The API as an ASGI application."""
    app = FastAPI(
        title="specplug",
        version=__version__,
        summary="An OpenAI-compatible server of one model",
        responses=_ERRORS,
    )
    _add_error_handlers(app)

    wishes = {"parameters": PARAMETERS}

    @app.post(
        "/v1/completions",
        response_model=Completion,
        responses=_or_stream("A completion"),
        openapi_extra=wishes,
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a prompt, or several."""
        return await serving.complete(body, request)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=_or_stream("An answer"),
        openapi_extra=wishes,
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Complete a chat."""
        return await serving.chat(body, request)

    @app.post(
        "/flush_cache",
        response_class=Response,
        responses={200: {"description": "The text is forgotten"}},
    )
    async def flush_cache(body: FlushRequest | None = None) -> Response:
        """Forget the text of earlier requests: cached prefixes, and what an algorithm keeps."""
        await serving.flush(None if body is None else body.cache_salt)
        return Response()

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the model that is served."""
        return ModelList(data=serving.models)

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Model:
        """Return the model of that name."""
        serving.check_model(model)
        return serving.models[0]

    @app.get("/health", responses={503: {"model": Health, "description": "No requests are taken"}})
    async def health() -> Response:
        """Whether the server takes requests."""
        health = serving.health
        code = 200 if health.status == "ok" else 503
        return Response(health.model_dump_json(), code, media_type="application/json")

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        await serving.stats()
        return Response(serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Counted(LimitsMiddleware(app, limits), serving.metrics)


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    @app.exception_handler(APIError)
    async def error(request: Request, error: APIError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = f"{request.method} {request.url.path}"
        reasons = {404: f"{path}: there is nothing here", 405: f"{path}: wrong method"}
        message = reasons.get(error.status_code, str(error.detail))
        response = error_response(APIError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # the client is gone and does not read it

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        return error_response(APIError(500, f"{type(error).__name__} in the server; it is logged"))
