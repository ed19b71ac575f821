"""What Prometheus is told."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

from specplug import LLM, SamplingParams
from specplug.serve.messages import Stats
from specplug.serve.metrics import Metrics

PROMPT = "a, b, c, d, e, f, " * 6


def families(text: str) -> dict[str, Any]:
    """Metrics by name."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_engine_counts_what_llm_counts(serve: Any) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 0.2, "seed": 1}
    server: ServerProcess = serve("--speculative-algorithm", "NGRAM")
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert families(response.text)["specplug_accepted_by_position"].samples == []
    assert server.complete(PROMPT, **settings).status_code == 200
    with LLM(speculative_algorithm="NGRAM") as llm:
        llm.generate(PROMPT, SamplingParams(**settings))
        stats = llm.stats()
    labels = {"algorithm": "NGRAM", "rank": "0"}
    for name in ("prompt_tokens", "output_tokens", "verifications", "retractions"):
        assert server.metric(f"{name}_total", **labels) == stats[name]
    assert server.metric("requests_total", finish_reason="length", **labels) == 1
    assert server.metric("steps_total", mode="decode", **labels) == stats["steps"]["decode"]
    assert stats["accepted"] > stats["verifications"] + 3, "drafts are accepted"
    for name in ("accepted_by_position", "drafted_by_position"):
        for position, count in enumerate(stats[name], 1):
            assert server.metric(f"{name}_total", position=str(position), **labels) == count
    assert server.metric("accept_length_sum", **labels) == stats["accepted"]
    assert server.metric("accept_length_count", **labels) == stats["verifications"]
    assert server.metric("accept_length_bucket", le="1.0", **labels) == stats[
        "accepted_by_length"
    ].get(1, 0)
    assert server.metric("http_responses_total", path="/v1/completions", status="200") == 1
    for name in ("time_to_first_token", "request", "queue"):
        assert server.metric(f"{name}_seconds_count") == 1
    assert server.metric("inter_token_latency_seconds_count") == 39
    assert server.metric("time_to_first_token_seconds_sum") > 0
    assert server.metric("time_to_first_token_seconds_sum") < server.metric("request_seconds_sum")
    assert server.is_whole


def test_statistics_may_lack_keys_and_have_others() -> None:
    metrics = Metrics()
    metrics.engines.algorithms = ["NEW"]
    occupancy = {"running": 3, "waiting": 2, "total": 10, "free": 1, "cached": 4, "available": 5}
    metrics.engines.stats = [Stats(totals={"output_tokens": 7, "new": {}}, occupancy=occupancy)]
    found = families(metrics.text().decode())
    (sample,) = found["specplug_output_tokens"].samples
    assert (sample.labels, sample.value) == ({"algorithm": "NEW", "rank": "0"}, 7)
    assert found["specplug_prompt_tokens"].samples == []
    assert found["specplug_kv_usage"].samples[0].value == pytest.approx(0.5)
    assert found["specplug_waiting_requests"].samples[0].value == 2
