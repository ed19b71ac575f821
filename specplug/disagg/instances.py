"""Makes the prefill or the decode instance of an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from specplug.algorithm import SpecConfig
from specplug.bounds import check_seconds
from specplug.disagg.identity import Identity, folder_fingerprint, model_fingerprint
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.request import Request
from specplug.errors import UsageError
from specplug.kv.prefix_cache import PrefixCache
from specplug.model.model_runner import ModelRunner

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.prefill_instance import PrefillInstance
    from specplug.disagg.zmq_transport import ZmqTransport

MODES = ("prefill", "decode", "both")
"""What ``disaggregation`` may be: one of the two sides, or both of them in one process."""

DEFAULT_ADDRESS = "tcp://127.0.0.1:30100"
"""Where a decode instance waits for prefill instances unless told otherwise."""


def check_mode(mode: str | None, address: str | None, timeout: float, *, shares_mlps: bool) -> None:
    """Refuse a mode that there is not.

    Raises:
        UsageError: it, or the timeout, cannot be used; there is an address and no mode; or both
            sides are to be in one process of several that share their MLPs.
    """
    if mode is None and address is not None:
        raise UsageError(
            f"disaggregation_address={address!r} without disaggregation: expected one of "
            f"{', '.join(MODES)} with it"
        )
    if mode is not None and mode not in MODES:
        raise UsageError(f"disaggregation={mode!r}: expected {', '.join(MODES)}, or None")
    if mode == "both" and shares_mlps:
        raise UsageError(
            "disaggregation='both' with enable_dp_attention: the two sides of a process take "
            "turns, and would wait for those of another that take them the other way round; "
            "expected prefill or decode, with ranks of their own for each side"
        )
    check_seconds("disaggregation_timeout", timeout)


def make_decode_instance(
    runtime: EngineRuntime,
    runner: ModelRunner,
    cache: PrefixCache,
    *,
    address: str | None,
    timeout: float,
    both: bool,
) -> DecodeInstance:
    """The decode instance of an engine, bound at ``address``.

    Raises:
        UsageError: it cannot be bound, or pyzmq is missing.
    """
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.incoming import KVFormat

    where = address or ("tcp://127.0.0.1:*" if both else DEFAULT_ADDRESS)
    return DecodeInstance(
        _zmq().bind(where),
        identity_of(runner, runtime.config, cache.pool.page_size),
        cache=cache,
        form=KVFormat(shapes=runtime.kv_shapes, dtype=runtime.dtype, vocab_size=runtime.vocab_size),
        most_away=runtime.max_running_requests,
        timeout=timeout,
        moment=0.0005 if both else 0.002,  # the other side takes its turn in the same thread
    )


def make_prefill_instance(
    identity: Identity,
    *,
    address: str | None,
    prepare: Callable[..., Request],
    submit: Callable[[Request], None],
    abort: Callable[[str], None],
) -> PrefillInstance:
    """The prefill instance of an engine, for the decode instances at ``address``, or at several
    with commas between them.

    Raises:
        UsageError: an address cannot be one, or pyzmq is missing.
    """
    from specplug.disagg.prefill_instance import Link, PrefillInstance

    links = []
    with ExitStack() as opened:
        for each in (address or DEFAULT_ADDRESS).split(","):
            links.append(Link(_zmq().connect(each.strip())))
            opened.callback(links[-1].transport.close)
        opened.pop_all()
    return PrefillInstance(links, identity, prepare=prepare, submit=submit, abort=abort)


def identity_of(runner: ModelRunner, config: SpecConfig, page_size: int) -> Identity:
    """What an instance says of itself."""
    assert runner.fingerprint is not None, "the runner was not to be identified"
    shape = runner.kv_shape
    return Identity(
        model=model_fingerprint(runner.fingerprint, config.target_config),
        dtype=str(runner.dtype).removeprefix("torch."),
        page_size=page_size,
        kv=(shape.num_layers, shape.num_kv_heads, shape.head_dim),
        draft=f"{config.algorithm} {folder_fingerprint(config.draft_model_path)}".strip(),
    )


def _zmq() -> type[ZmqTransport]:
    try:
        from specplug.disagg.zmq_transport import ZmqTransport
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        raise UsageError(
            "disaggregation needs pyzmq, which is not installed: pip install 'specplug[disagg]'"
        ) from error
    return ZmqTransport
