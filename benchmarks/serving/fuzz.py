"""Thousands of generated requests to a real server: does any take it down, or a page with it?

    python benchmarks/serving/fuzz.py [--requests N] [--workers N] [--seed N]

schemathesis reads the server's own schema and generates requests from it, as many valid as invalid
ones, for every endpoint; most for the two that complete. It holds each response against the
schema: status, content type, and shape; and what the schema forbids must be refused. The server
runs NGRAM with a small context, a small queue and a small KV pool, and checks its pool whenever it
is idle (``SPECPLUG_DEBUG=1``). Printed is how often each endpoint gave each status. Exits with 1 if

- a response has a status of 5xx, or is not what the schema says;
- afterwards a request is open, or a KV page is neither free nor cached;
- a completion then is not what it was before;
- the server has written to standard error (but for xgrammar's warnings about a regular expression),
  or does not end with 0 on SIGTERM.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import attrs
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from server_process import DEADLINE, ServerProcess, head, line, start_server, wait_until

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
ARGUMENTS = (
    *("--speculative-algorithm", "NGRAM", "--max-model-len", "48"),
    *("--max-total-tokens", "320", "--max-queue", "32"),
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
COMPLETING_SHARE = 0.9
BATCH = 25
"""Requests of one endpoint in a row, by one worker."""
MOST_TOLD = 20
REGEX_WARNING = re.compile(r"regex_converter\.cc:\d+: Warning: |^\s*$")
"""What xgrammar itself writes to standard error about a client's regular expression."""


@attrs.define
class Result:
    """What came of the requests.

    Attributes:
        statuses: (endpoint, valid or not, status) -> how often.
        failures: what was not as it must be.
    """

    statuses: Counter[tuple[str, str, int]] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)
    seconds: float = 0.0

    @property
    def sent(self) -> int:
        """Requests."""
        return sum(self.statuses.values())


class Fuzzer:
    """Sends generated requests from several threads, which take turns at all but the sending.

    Args:
        server: to which.
        requests: how many, of all threads together.
        seed: of all that is random.
    """

    def __init__(self, server: ServerProcess, requests: int, seed: int) -> None:
        self.result = Result()
        self._left = requests
        self._seed = seed
        self._lock = threading.Lock()
        self.generating = threading.Lock()
        """Held by the one thread that generates or checks; several at a time would be too much for
        Python's own parser, which hypothesis asks for the source of lambdas."""
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        self.operations = [found.ok() for found in schema.get_all_operations()]

    def run(self, workers: int) -> Result:
        """Send all requests."""
        started = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(self._work, n) for n in range(workers)]:
                future.result()
        self.result.seconds = time.perf_counter() - started
        return self.result

    def _work(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        completing = [operation for operation in self.operations if operation.method == "post"]
        others = [operation for operation in self.operations if operation.method != "post"]
        while size := self._take(BATCH):
            heavy = chance.random() < COMPLETING_SHARE
            operation = chance.choice(completing if heavy else others)
            mode = chance.choice(list(GenerationMode))
            try:
                sent = self._send(operation, mode, size, chance.getrandbits(32))
            except hypothesis.errors.Unsatisfiable:  # what has no parameter cannot be invalid
                sent = 0
            self._take(sent - size)

    def _take(self, size: int) -> int:
        """Of the requests that are left, so many at most; a negative number gives some back."""
        with self._lock:
            taken = min(size, self._left)
            self._left -= taken
            return taken

    def _send(self, operation: Any, mode: GenerationMode, size: int, seed: int) -> int:
        """Send so many requests to an endpoint, or fewer if there are no more; how many."""
        sent = 0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=size,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal sent
            if sent < size:
                sent += 1
                self.send_one(case, mode)

        with self.generating:
            send()
        return sent

    def send_one(self, case: Any, mode: GenerationMode) -> None:
        endpoint = f"{case.method} {case.operation.path}"
        self.generating.release()
        try:
            response = case.call(timeout=DEADLINE)
        finally:
            self.generating.acquire()
        key = endpoint, mode.value, response.status_code
        told = []
        try:
            case.validate_response(response, checks=CHECKS)
        except AssertionError as error:
            told.append(f"{endpoint}: {error}")
        except BaseExceptionGroup as group:
            told += [f"{endpoint}: {error}" for error in group.exceptions]
        self.result.statuses[key] += 1
        self.result.failures += told


@contextmanager
def fuzzed_server() -> Iterator[ServerProcess]:
    """The server that is fuzzed."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        arguments = *ARGUMENTS, "--chat-template", template.name
        server = start_server(*arguments, SPECPLUG_DEBUG="1")
    try:
        yield server
    finally:
        server.kill()


def fuzz(requests: int, workers: int, seed: int) -> Result:
    """Start a server, fuzz it, and see that nothing is lost."""
    prompt = {"prompt": "def mean(values):", "seed": 1, "max_tokens": 24}
    with fuzzed_server() as server:
        before = server.complete(**prompt).json()["choices"]
        result = Fuzzer(server, requests, seed).run(workers)
        wait_until(lambda: server.metric("open_requests") == 0)
        if not server.is_whole:
            result.failures.append(f"the pool is not whole: {server.get('/metrics').text}")
        if server.complete(**prompt).json()["choices"] != before:
            result.failures.append("a completion is not what it was before")
        server.signal()
        if (code := server.wait()) != 0:
            result.failures.append(f"the server ended with {code}")
        told = [line for line in server.errors if not REGEX_WARNING.search(line)]
        if told:
            result.failures.append(f"the server told of errors: {''.join(told)}")
    return result


def show(result: Result) -> None:
    """Print the table and the verdict."""
    statuses = sorted({status for _, _, status in result.statuses})
    print(head("endpoint", "generated as", *map(str, statuses)))
    for endpoint, mode in sorted({key[:2] for key in result.statuses}):
        counts = [result.statuses[endpoint, mode, status] for status in statuses]
        print(line([endpoint, mode, *(f"{count:,}" if count else "" for count in counts)]))
    print(f"{result.sent:,} requests in {result.seconds:.0f} s")
    for failure in result.failures[:MOST_TOLD]:
        print(f"FAILED: {failure}")
    more = len(result.failures) - MOST_TOLD
    if more > 0:
        print(f"and {more} more")
    if not result.failures:
        print("no 5xx, every response as the schema says, the pool whole")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result = fuzz(arguments.requests, arguments.workers, arguments.seed)
    show(result)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
