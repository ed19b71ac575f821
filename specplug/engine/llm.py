"""``LLM``: the embedded engine as a Python object. Names are those vLLM users know."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import torch

from specplug.algorithm import DEFAULT_MODEL, SpecConfig
from specplug.engine.engine import Engine
from specplug.engine.features import Features
from specplug.engine.grammar import GrammarCompiler
from specplug.engine.model_runner import ModelRunner
from specplug.engine.outputs import RequestOutput
from specplug.engine.page_pool import PagePool
from specplug.engine.prefix_cache import PrefixCache
from specplug.engine.request import Request, make_detokenizer
from specplug.engine.request_table import RequestTable
from specplug.engine.runtime import EngineRuntime
from specplug.engine.sampling_params import SamplingParams
from specplug.engine.scheduler import Scheduler, SchedulerConfig
from specplug.engine.statistics import Statistics
from specplug.engine.step import StepRunner
from specplug.errors import FallbackWarning, UsageError
from specplug.registry import Registry, build_plugin_manager
from specplug.spec.defaults import CoreDefaults

Prompt = str | Sequence[int]

ASSETS = Path(__file__).parent.parent / "assets"
_CPU_POOL_BYTES = 512 << 20
_CUDA_POOL_SHARE = 0.6
_SMALL_MODEL = 50_000_000


class LLM:
    """A model under an algorithm, ready to generate.

    Args:
        model: folder or hub id of a causal LM of transformers; None or ``"tiny-code"``: the
            default model that ships with specplug.
        tokenizer: folder or hub id of its tokenizer; None: the model's own. Without one, prompts
            are token ids and outputs have no text.
        dtype: "auto" (float32 on the CPU, else the checkpoint's), "float32", "bfloat16",
            "float16" or "float64".
        device: "cpu", "cuda", "cuda:1", …; None: CUDA if there is one.
        seed: from which requests without a seed get theirs.
        speculative_algorithm: name of an installed algorithm, or a plugin object.
        speculative_draft_model_path: folder of its draft weights.
        speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens: draft depth S,
            branches K, nodes N; None: the algorithm's defaults.
        page_size: tokens a KV page.
        chunked_prefill_size: the token budget of a step: most prompt tokens, and with
            ``enable_mixed_chunk`` the nodes of drafts too; None: no limit.
        enable_mixed_chunk: prompts and drafts share a step, so that a long prompt holds up nobody;
            else prompts go first, in steps of their own.
        max_running_requests: most requests that run at a time; more wait.
        max_total_tokens: slots of the KV pool; None: what fits a memory budget.
        max_model_len: context length; None: the model's.
        disable_overlap_schedule: process each step's results before the next step is launched.
        disable_radix_cache: do not keep the KV of prompts and outputs for others that begin alike.
        disable_cuda_graph: do not record passes as CUDA graphs (on the CPU there are none).
        num_threads: torch's threads on the CPU, which are the whole process's. None: one for a
            model of under 50 million parameters, whose operations are too short to share (two
            threads on busy cores then wait for one another), else torch's own choice.

    Raises:
        UsageError: a value cannot be used, or the algorithm is not installed.
        PluginError: the algorithm's plugin is broken.
        CheckpointError: the model or the draft model cannot be loaded, or do not fit.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str | None = None,
        seed: int = 0,
        speculative_algorithm: str | object = "NONE",
        speculative_draft_model_path: str | Path | None = None,
        speculative_num_steps: int | None = None,
        speculative_eagle_topk: int | None = None,
        speculative_num_draft_tokens: int | None = None,
        page_size: int = 16,
        chunked_prefill_size: int | None = 512,
        max_running_requests: int = 8,
        max_total_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_mixed_chunk: bool = False,
        disable_overlap_schedule: bool = False,
        disable_radix_cache: bool = False,
        disable_cuda_graph: bool = False,
        num_threads: int | None = None,
    ) -> None:
        for name, value, optional in (
            ("page_size", page_size, False),
            ("chunked_prefill_size", chunked_prefill_size, True),
            ("max_running_requests", max_running_requests, False),
            ("max_total_tokens", max_total_tokens, True),
            ("max_model_len", max_model_len, True),
            ("num_threads", num_threads, True),
        ):
            _check_positive(name, value, optional)
        if not isinstance(seed, int):
            raise UsageError(f"seed={seed!r}: expected an integer")
        registry = Registry()
        selected = registry.select(speculative_algorithm)
        manager = build_plugin_manager(selected, registry.extensions(), CoreDefaults())
        self._hooks: Any = manager.hook
        where = _device(device)
        path = _model_path(model)
        config = SpecConfig.resolve(
            selected.info,
            num_steps=speculative_num_steps,
            topk=speculative_eagle_topk,
            num_draft_tokens=speculative_num_draft_tokens,
            draft_model_path=_optional_path(speculative_draft_model_path),
            model_name=DEFAULT_MODEL if path == str(ASSETS / "tiny_code") else None,
            target_config=_target_config(path),
        )
        config = self._hooks.validate_config(config=config)
        for adjustment in config.adjustments:
            warnings.warn(f"{config.algorithm}: {adjustment}", FallbackWarning, stacklevel=2)
        self._runner = ModelRunner(path, _dtype(dtype, where), where)
        self.spec_config = config
        if where.type == "cpu":
            _set_threads(num_threads, self._runner.num_parameters)
        self.tokenizer = _load_tokenizer(tokenizer, path)
        self.context_len = min(max_model_len or self._runner.context_len, self._runner.context_len)
        runtime = EngineRuntime(
            config,
            self._runner,
            self.context_len,
            max_running_requests,
            graphs=where.type == "cuda" and not disable_cuda_graph,
            draft_verifies=self._hooks.supports_target_verify_for_draft(),
        )
        runtime.worker = self._hooks.create_worker(runtime=runtime)
        self._eos = _eos_token_ids(self._runner)
        self._seed = seed
        self._numbers = itertools.count()
        self._inbox: list[Request] = []
        self._grammars = GrammarCompiler(self.tokenizer, self._runner.vocab_size, self._eos)
        features = Features()
        algorithm, able = selected.info.name, selected.info.capabilities
        overlap = features.decide(
            "overlap",
            refused_by="disable_overlap_schedule" if disable_overlap_schedule else None,
            obstacle=None if able.overlap else f"{algorithm} drafts from what the host has read",
        )
        caches = features.decide(
            "prefix_cache",
            refused_by="disable_radix_cache" if disable_radix_cache else None,
            obstacle=None
            if able.prefix_cache
            else f"{algorithm} must itself see every token that it drafts behind",
        )
        self._features = features
        self._limits = SchedulerConfig(
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
            mixed_chunk=enable_mixed_chunk,
            columns=config.num_steps + 1,
            num_draft_tokens=config.num_draft_tokens,
            reserve=max(config.num_draft_tokens, config.num_draft_slots, config.num_steps + 1),
            steps_in_flight=2 if overlap else 1,
        )
        self._engine = self._make_engine(runtime, page_size, max_total_tokens, caches)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and free the model and its caches."""
        if self._engine is None:
            return
        try:
            self._abort_all()
        finally:
            self._engine = None  # type: ignore[assignment]
            self._runner = None  # type: ignore[assignment]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together, and wait for all of them.

        Args:
            prompts: texts or lists of token ids; one alone may stand without a list.
            sampling_params: one for all, or one for each.
            priority: one for all, or one for each. Requests of a lower one are admitted first, and
                are the last to give way when the KV pool runs short; equal ones in their order.
            on_finished: called with each request's output when it ends (for a progress bar).

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            UsageError: a prompt or a setting cannot be used; nothing has run then.
        """
        outputs: dict[str, RequestOutput] = {}
        requests = self._make_all(prompts, sampling_params, priority)
        with closing(self._run(requests, partial=False)) as ended:
            for output in ended:
                outputs[output.request_id] = output
                if on_finished is not None:
                    on_finished(output)
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Complete prompts and yield what came, step by step; ``delta`` is the new text.

        The last output of each request has a ``finish_reason``. Closing the iterator aborts what
        still runs.

        Raises:
            UsageError: a prompt or a setting cannot be used; nothing runs then.
        """
        return self._run(self._make_all(prompts, sampling_params, priority), partial=True)

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> str:
        """Queue a request for ``step``, at any time; for callers that have a loop of their own.

        Returns:
            Its name, which its outputs have too.

        Raises:
            UsageError: the prompt or a setting cannot be used.
        """
        prompts: list[Any] = [prompt]
        (request,) = self._make_all(prompts, sampling_params, priority)
        request.inbox = self._inbox
        self._engine.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Launch the next step of all requests, and process one that was launched: the outputs of
        those requests from ``add_request`` that moved, or ended, by it.

        Raises:
            Exception: what a plugin raised. All requests have ended then, with that error, and the
                next call returns their outputs.
        """
        self._check_open()
        if self._engine.has_work or not self._inbox:
            self._step()
        moved = [request for request in _emptied(self._inbox) if not request.delivered]
        for request in moved:
            request.delivered = request.finished
        return [request.output() for request in moved]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do or to return."""
        return bool(self._inbox) or (self._engine is not None and self._engine.has_work)

    def abort(self, request_id: str) -> None:
        """End a request; its output so far comes with ``finish_reason="abort"``.

        May be called from another thread, or between two outputs of ``stream``.
        """
        if self._engine is not None:
            self._engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Totals since the engine was made; see ``specplug.engine.statistics``."""
        self._check_open()
        return self._engine.statistics.as_dict()

    def flush_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            UsageError: requests are running.
        """
        self._check_open()
        if self._engine.has_work:
            raise UsageError("flush_cache: requests are running; wait for them or abort them")
        self._engine.scheduler.cache.clear()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._check_open()
        self._engine.statistics = Statistics()

    @property
    def effective_config(self) -> dict[str, Any]:
        """What the run really uses, what was adjusted and what is off, and why."""
        self._check_open()
        config = attrs.asdict(self.spec_config, filter=lambda a, _: a.name != "target_config")
        pool = self._engine.scheduler.cache.pool
        return {
            **config,
            **self._features.states,
            "cuda_graph": self._engine.cuda_graph,
            "mixed_chunk": "on" if self._limits.mixed_chunk else "off: not enabled",
            "chunked_prefill_size": self._limits.chunked_prefill_size,
            "max_running_requests": self._limits.max_running_requests,
            "page_size": pool.page_size,
            "max_total_tokens": pool.num_tokens,
            "context_len": self.context_len,
            "device": str(self._runner.device),
            "num_threads": torch.get_num_threads(),
            "dtype": str(self._runner.dtype).removeprefix("torch."),
        }

    def check_pool(self) -> None:
        """Assert that every KV page is free, cached, or owned by one running request."""
        self._check_open()
        self._engine.scheduler.check()

    def _make_engine(
        self, runtime: EngineRuntime, page_size: int, max_total_tokens: int | None, caches: bool
    ) -> Engine:
        limits, config = self._limits, self.spec_config
        width = self.context_len + limits.steps_in_flight * limits.columns + limits.reserve
        num_slots = max_total_tokens or _default_slots(runtime, width)
        num_pages = -(-num_slots // page_size) + 1
        table = RequestTable(runtime.num_rows, width, page_size, runtime.device)
        kv = runtime.allocate_pool(num_pages * page_size, table)
        future_map = self._hooks.create_future_map(runtime=runtime)
        lookahead = config.draft_lookahead
        if lookahead is None:
            lookahead = 1 if runtime.has_draft_cache else 0
        cache = PrefixCache(PagePool(num_pages, page_size), lookahead, enabled=caches)
        return Engine(
            scheduler=Scheduler(limits, cache, table),
            steps=StepRunner(runtime, self._runner, self._hooks, future_map, kv),
            runtime=runtime,
            hooks=self._hooks,
            overlap=limits.steps_in_flight > 1,
            tokenizer=self._backend_tokenizer,
        )

    @property
    def _backend_tokenizer(self) -> Any:
        return None if self.tokenizer is None else self.tokenizer.backend_tokenizer

    def _check_open(self) -> None:
        if self._engine is None:
            raise UsageError("this LLM is closed; make another one")

    def _make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[Request]:
        self._check_open()
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        return self._make_requests(batch, params, _as_priorities(priority, len(batch)))

    def _run(
        self, requests: Sequence[Request], *, partial: bool
    ) -> Generator[RequestOutput, None, None]:
        self._check_open()  # it may have been closed since the requests were made
        live = {request.request_id: request for request in requests}
        inbox: list[Request] = []  # a step of another stream may move ours
        for request in requests:
            request.inbox = inbox
            self._engine.add(request)
        try:
            while live:
                if not inbox:
                    assert self._engine is None or self._engine.has_work, "requests were lost"
                    self._step()
                for request in _emptied(inbox):
                    if request.request_id in live and (request.finished or partial):
                        if request.finished:
                            del live[request.request_id]
                        yield request.output()
        finally:
            for request_id in live:
                self.abort(request_id)
            self._drain(requests)

    def _step(self) -> None:
        """Run a step and put the requests that it moved where they are waited for."""
        if self._engine is None:  # closed in the middle of a stream, whose requests were aborted
            return
        moved: list[Request] = []
        try:
            moved = self._engine.step()
        except BaseException as error:
            moved = self._engine.abandon(error)
            raise
        finally:
            for request in moved:
                request.inbox.append(request)

    def _drain(self, requests: Sequence[Request]) -> None:
        """Process aborts and what is in flight, so that nothing of these requests stays behind."""
        while self._engine is not None and self._engine.has_work:
            if all(request.finished and not request.in_flight for request in requests):
                break
            self._step()

    def _abort_all(self) -> None:
        for request in list(self._engine.scheduler):
            self._engine.abort(request.request_id)
        while self._engine.has_work:
            self._step()

    def _make_requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[Request]:
        requests: list[Request] = []
        for prompt, wanted, priority in zip(prompts, params, priorities, strict=True):
            try:
                requests.append(self._make_request(prompt, wanted, priority))
            except UsageError as error:
                if len(prompts) == 1:
                    raise
                which = f"prompt {len(requests) + 1} of {len(prompts)}"
                raise UsageError(f"{which}: {error}") from error
        return requests

    def _make_request(self, prompt: Prompt, params: SamplingParams, priority: int) -> Request:
        text, ids = self._tokenize(prompt)
        self._check_tokens("logit_bias", params.logit_bias)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        room = self.context_len - len(ids)
        if room < 1:
            raise UsageError(
                f"the prompt has {len(ids)} tokens; expected at most {self.context_len - 1}, "
                f"since the context is {self.context_len} and one token must fit behind it"
            )
        if params.stop and self.tokenizer is None:
            raise UsageError(
                f"stop={params.stop!r} needs a tokenizer; the model has none: use stop_token_ids"
            )
        if params.return_routed_experts and not self._runner.captures.num_routers:
            raise UsageError(
                "return_routed_experts=True: the target is no mixture of experts, or transformers "
                "does not say which of its modules route; leave it out"
            )
        if (params.logprobs or 0) > self._runner.vocab_size:
            raise UsageError(
                f"logprobs={params.logprobs}: expected at most the vocabulary's "
                f"{self._runner.vocab_size}"
            )
        number = next(self._numbers)
        request = Request(
            request_id=str(number),
            number=number,
            priority=priority,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            seed=self._seed_for(number) if params.seed is None else params.seed,
            eos_token_ids=self._eos,
            detokenizer=make_detokenizer(self._backend_tokenizer, params),
            needs=params.needs,
            guide=self._grammars.guide(params) if params.grammar else None,
        )
        pool, need = self._engine.scheduler.cache.pool, request.most_tokens
        if pool.pages_for(need) > pool.num_pages - 1:
            raise UsageError(
                f"the prompt's {len(ids)} tokens and max_tokens={request.max_tokens} need {need} "
                f"KV slots; the pool has {pool.num_tokens}: "
                "raise max_total_tokens or lower max_tokens"
            )
        return request

    def _seed_for(self, number: int) -> int:
        """A seed of 64 bits for the request of this number."""
        return (self._seed * 1_000_003 + number) % (1 << 63)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("the model has no tokenizer: give the prompt as token ids")
            try:
                ids = tuple(self.tokenizer(prompt)["input_ids"])
            except TypeError as error:  # lone surrogates, from bytes that were no UTF-8
                raise UsageError(f"prompt {prompt[:40]!r}: expected Unicode text") from error
            text: str | None = prompt
        else:
            try:
                text, ids = None, tuple(prompt)
            except TypeError as error:
                raise UsageError(
                    f"prompt {prompt!r}: expected a text or a list of token ids"
                ) from error
            self._check_tokens("prompt token id", ids)
        if not ids:
            raise UsageError("the prompt is empty; expected at least one token")
        return text, ids

    def _check_tokens(self, what: str, tokens: Any) -> None:
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < self._runner.vocab_size:
                raise UsageError(
                    f"{what} {token!r}: expected an integer from 0 to {self._runner.vocab_size - 1}"
                )


def _check_positive(name: str, value: int | None, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r}: expected an integer of at least 1")


def _device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device={device!r}: expected cpu, cuda or cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: expected cpu, cuda or cuda:N")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={device!r}: there is no CUDA device here; use cpu")
    return where


def _dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    names = ("float32", "bfloat16", "float16", "float64")
    if dtype not in names:
        raise UsageError(f"dtype={dtype!r}: expected auto, {', '.join(names)}")
    value: torch.dtype = getattr(torch, dtype)
    return value


def _set_threads(num_threads: int | None, num_parameters: int) -> None:
    if num_threads is None and num_parameters < _SMALL_MODEL:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def _model_path(model: str | Path | None) -> str:
    if model is None or str(model) == DEFAULT_MODEL:
        return str(ASSETS / "tiny_code")
    return str(model)


def _target_config(path: str) -> dict[str, Any]:
    """The target's ``config.json``, read before any weight so that a misfit is told early."""
    from transformers import AutoConfig

    from specplug.engine.model_runner import check_model_path
    from specplug.errors import CheckpointError

    check_model_path(path)
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(path).get_text_config().to_dict()
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"model {path!r}: its config cannot be read: {first}") from error
    return config


def _load_tokenizer(tokenizer: str | Path | None, model_path: str) -> Any | None:
    from transformers import AutoTokenizer

    from specplug.errors import CheckpointError

    try:
        return AutoTokenizer.from_pretrained(str(tokenizer or model_path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if tokenizer is not None:
            raise CheckpointError(f"tokenizer {str(tokenizer)!r} cannot be loaded") from error
        return None


def _eos_token_ids(runner: ModelRunner) -> frozenset[int]:
    generation = getattr(runner.model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(runner.config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def _default_slots(runtime: EngineRuntime, width: int) -> int:
    """As many slots as a memory budget holds, at most what all running requests can need."""
    if runtime.device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(runtime.device)[0] * _CUDA_POOL_SHARE)
    else:
        budget = _CPU_POOL_BYTES
    most = runtime.max_running_requests * width
    return max(width, min(most, budget // runtime.bytes_per_slot()))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        batch: list[Any] = list(prompts)
    except TypeError as error:
        raise UsageError(f"prompts={prompts!r}: expected texts or lists of token ids") from error
    return [batch] if batch and isinstance(batch[0], int) else batch


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = list(params) if isinstance(params, Sequence) else [params]
    for each in found:
        if not isinstance(each, SamplingParams):
            raise UsageError(
                f"sampling_params={each!r}: expected a SamplingParams, or one for each prompt"
            )
    if len(found) != count:
        raise UsageError(f"{len(found)} sampling_params for {count} prompts: expected as many")
    return found


def _emptied(inbox: list[Request]) -> list[Request]:
    """What is in the inbox, each request once; it is empty then."""
    moved = list(dict.fromkeys(inbox))
    inbox.clear()
    return moved


def _as_priorities(priority: int | Sequence[int], count: int) -> list[int]:
    try:
        priorities = [priority] * count if isinstance(priority, int) else list(priority)
    except TypeError as error:
        raise UsageError(
            f"priority={priority!r}: expected an integer, or one for each prompt"
        ) from error
    if len(priorities) != count:
        raise UsageError(f"{len(priorities)} priorities for {count} prompts: expected as many")
    for value in priorities:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"priority={value!r}: expected an integer; lower ones come first")
    return priorities
