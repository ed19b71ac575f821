"""``benchmarks/serving/fuzz.py``, small: no request takes the server down, and it notices."""

from __future__ import annotations

from typing import Any

import fuzz
import pytest
from server_process import ServerProcess
from warm_server import start_warm_server


@pytest.mark.filterwarnings("ignore")
def test_some_fuzzed_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "start_server", start_warm_server)
    result = fuzz.fuzz(150, workers=3, seed=1)
    assert result.failures == []
    assert result.sent == 150
    assert {mode for _, mode, _ in result.statuses} == {"positive", "negative"}
    assert {status for _, _, status in result.statuses} >= {200, 400}


@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_told(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that the schema does not know: the server's own, but for its status."""
    fuzzer = fuzz.Fuzzer(server, 5, seed=0)
    (operation,) = [o for o in fuzzer.operations if o.path == "/v1/models"]
    call = operation.Case().call

    def changed(status: int) -> Any:
        def call_and_change(case: Any, **options: Any) -> Any:
            response = call(**options)
            response.status_code = status
            return response

        return call_and_change

    case = operation.Case()
    for status, complaint in ((500, "Server error"), (302, "Received: 302")):
        monkeypatch.setattr(type(case), "call", changed(status))
        with fuzzer.generating:
            fuzzer.send_one(case, schema_mode := fuzz.GenerationMode.POSITIVE)
        assert any(complaint in failure for failure in fuzzer.result.failures), complaint
        assert fuzzer.result.statuses["GET /v1/models", schema_mode.value, status] == 1
