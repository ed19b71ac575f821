"""Make the prefill or the decode instance of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from specplug.algorithm import SpecConfig
from specplug.config import EngineConfig
from specplug.disagg.identity import Identity, folder_fingerprint, model_fingerprint
from specplug.engine.kv_pool import KVPool
from specplug.engine.request import Request
from specplug.errors import UsageError, shown, warn_fallback
from specplug.kv.prefix_cache import PrefixCache
from specplug.model.target import Target

if TYPE_CHECKING:
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.prefill_instance import PrefillInstance
    from specplug.disagg.zmq_transport import ZmqTransport

DEFAULT_ADDRESS = "tcp://127.0.0.1:30100"
"""Where a decode instance waits for prefill instances unless told otherwise."""

NEEDS_ZMQ = "disaggregation needs pyzmq, which is not installed: pip install 'specplug[disagg]'"


def make_decode_instance(
    config: EngineConfig,
    specs: Sequence[SpecConfig],
    target: Target,
    kv: KVPool,
    cache: PrefixCache,
) -> DecodeInstance | None:
    """Make the decode instance of a run, bound at its address; None if its settings ask for none.

    Args:
        specs: of its algorithm, and of the parts that this one holds.

    Raises:
        UsageError: it cannot be bound, or pyzmq is missing.
    """
    if config.disaggregation not in ("decode", "both"):
        return None
    from specplug.disagg.decode_instance import DecodeInstance
    from specplug.disagg.incoming import KVFormat

    both = config.disaggregation == "both"
    where = config.disaggregation_address or ("tcp://127.0.0.1:*" if both else DEFAULT_ADDRESS)
    if config.disaggregation_key is None and not _is_local(where):
        warn_fallback(
            f"disaggregation_address={shown(where)} without disaggregation_key: whoever reaches "
            "this port can fill the machine's memory; give both sides the same key "
            "(--disaggregation-key @FILE)"
        )
    return DecodeInstance(
        _zmq().bind(where, key=config.disaggregation_key),
        identity_of(target, specs, config.page_size),
        cache=cache,
        form=KVFormat(shapes=kv.shapes, dtype=target.dtype, vocab_size=target.vocab_size),
        most_away=config.max_running_requests,
        timeout=config.disaggregation_timeout,
        moment=0.0005 if both else 0.002,  # the other side takes its turn in the same thread
    )


def make_prefill_instance(
    identity: Identity,
    *,
    address: str | None,
    key: str | None,
    prepare: Callable[..., Request],
    submit: Callable[[Request], None],
    abort: Callable[[str], None],
) -> PrefillInstance:
    """Make the prefill instance of an engine, for the decode instances at ``address`` (several with
    commas between them), which expect ``key``.

    Raises:
        UsageError: an address cannot be one, or pyzmq is missing.
    """
    from specplug.disagg.prefill_instance import Link, PrefillInstance

    links = []
    with ExitStack() as opened:
        for each in (address or DEFAULT_ADDRESS).split(","):
            links.append(Link(_zmq().connect(each.strip(), key=key)))
            opened.callback(links[-1].transport.close)
        opened.pop_all()
    return PrefillInstance(links, identity, prepare=prepare, submit=submit, abort=abort)


def identity_of(target: Target, configs: Sequence[SpecConfig], page_size: int) -> Identity:
    """Return the identity of an instance with this target.

    Args:
        configs: of its algorithm, and of the parts that this one holds.
    """
    drafts = (f"{each.algorithm} {folder_fingerprint(each.draft_model_path)}" for each in configs)
    assert target.fingerprint is not None, "the target was not to be identified"
    shape = target.kv_shape
    return Identity(
        model=model_fingerprint(target.fingerprint, configs[0].target_config),
        dtype=str(target.dtype).removeprefix("torch."),
        page_size=page_size,
        kv=(shape.num_layers, shape.num_kv_heads, shape.head_dim),
        draft=", ".join(map(str.strip, drafts)),
    )


def _is_local(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    return address.startswith(("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))


def _zmq() -> type[ZmqTransport]:
    try:
        from specplug.disagg.zmq_transport import ZmqTransport
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        raise UsageError(NEEDS_ZMQ) from error
    return ZmqTransport
