"""The loop of a prefill instance: takes requests, has the engine step, and sends what it gave."""

from __future__ import annotations

import logging
from typing import Any

from specplug.config import EngineConfig
from specplug.disagg.identity import Identity
from specplug.disagg.instances import make_prefill_instance
from specplug.distributed.rank_group import RankGroup
from specplug.engine.engine import Engine
from specplug.engine.input_processor import InputProcessor
from specplug.engine.request import Request, take_all
from specplug.errors import InstanceError
from specplug.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


class PrefillLoop:
    """Steps an engine whose requests come from decode instances.

    Args:
        config: of the run.
        identity: of this instance.
        engine: that prefills.
        inputs: makes requests for it.
        ranks: that step together with it; None: it is alone.

    Attributes:
        instance: speaks with the decode instances.

    Raises:
        UsageError: an address cannot be one, or pyzmq is missing.
    """

    def __init__(
        self,
        config: EngineConfig,
        identity: Identity,
        engine: Engine,
        inputs: InputProcessor,
        ranks: RankGroup | None,
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._ranks = ranks
        self._ended: list[Request] = []
        self.instance = make_prefill_instance(
            identity,
            address=config.disaggregation_address,
            key=config.disaggregation_key,
            prepare=self._prepare,
            submit=self._submit,
            abort=engine.abort,
        )

    def step(self, *, wait: bool) -> None:
        """Take what decode instances ask for, run a step, and send what it gave.

        Args:
            wait: if there is nothing to do, block for a moment.
        """
        # With other ranks the step itself waits, for these too.
        self.instance.receive(wait=wait and not self._engine.has_work and self._ranks is None)
        self.run()

    def run(self) -> None:
        """Run a step if there is work, or another rank may call, and send what it gave."""
        if self._engine.has_work or self._ranks is not None:
            try:
                self._engine.step()
            except InstanceError:
                raise
            except Exception:  # its requests have ended; the decode instances are told below
                _log.exception("a step has failed")
        outbox = self._engine.outbox
        self.instance.send(outbox.popleft() for _ in range(len(outbox)))
        self.instance.tell_failed(take_all(self._ended))

    def close(self) -> None:
        """Tell the decode instances that this one leaves, and disconnect."""
        try:
            self.instance.close()
        finally:
            self._ended.clear()
            del self.instance, self._engine  # of which it is called back

    def _prepare(self, prompt: Any, params: SamplingParams, *, priority: int) -> Request:
        (request,) = self._inputs.requests([prompt], params, priority)
        return request

    def _submit(self, request: Request) -> None:
        request.inbox = self._ended
        self._engine.add(request)
