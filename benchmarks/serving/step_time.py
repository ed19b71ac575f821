"""Does HTTP hold up the engine's steps? Their time with no other stream open, and with 200.

    python benchmarks/serving/step_time.py [--streams N] [--rounds N] [--seconds S]

A real server (``specplug serve``) runs a batch of 8 requests that generate all the time; their
streams are read. A step's time is what passes in the engine process from the end of one decode
step of all eight to the end of the next, told by the ``on_step`` hook of a small extension that is
installed for the purpose. It is measured for some seconds, beginning ``SETTLE`` after the eight
have been sent, under two conditions, which take turns:

alone   no other client is connected
open    200 more streams are open, whose requests wait for the eight; the client hangs up on one
        of them, and opens another, ten times a second, so that requests are parsed, tokenized and
        aborted all the time; and ten times a second /metrics is asked for

Server, engine and this client share the machine: with fewer than 3 free cores they wait for one
another, in the second condition more than in the first. Medians over all steps of all rounds, and
99th percentiles, are told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
from server_process import ServerProcess, head, line, start_server

BATCH = 8
SETTLE = 3.0
CHURN_SECONDS = 0.1
MEASURED = {"prompt": "def mean(values):\n    ", "max_tokens": 2000, "ignore_eos": True, "n": BATCH}
WAITING = {"prompt": "class Stack:\n    " * 40, "max_tokens": 100, "priority": 1}

RECORD = struct.Struct("<dq")
"""When a step ended, by the machine's monotonic clock, and how many requests decoded in it."""

EXTENSION = """
import os
import struct
import time

from specplug import hookimpl


class StepTimes:
    def __init__(self):
        self._file = open(os.environ["STEP_TIMES"], "ab", buffering=0)

    @hookimpl
    def on_step(self, report):
        self._file.write(struct.pack("<dq", time.monotonic(), len(report.decode_ids)))


extension = StepTimes()
"""


@attrs.define
class Client:
    """Opens streams at a server."""

    server: ServerProcess
    writers: list[asyncio.StreamWriter] = attrs.field(factory=list)

    async def open(self, **body: Any) -> asyncio.StreamReader:
        """A stream whose response has begun."""
        data = json.dumps({**body, "stream": True}).encode()
        reader, writer = await self._send(
            "POST /v1/completions",
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n",
            data,
        )
        status = await reader.readline()
        assert status.startswith(b"HTTP/1.1 200 "), status
        self.writers.append(writer)
        return reader

    async def get(self, path: str) -> bytes:
        """The body of a response."""
        reader, writer = await self._send(f"GET {path}", "Connection: close\r\n")
        try:
            return (await reader.read()).partition(b"\r\n\r\n")[2]
        finally:
            writer.close()

    async def idle(self) -> None:
        """Hang up on all streams, and wait until the server has noticed."""
        for writer in self.writers:
            writer.close()
        self.writers.clear()
        while b"specplug_open_requests 0.0" not in await self.get("/metrics"):
            await asyncio.sleep(0.05)

    async def _send(
        self, what: str, headers: str, data: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self.server.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"{what} HTTP/1.1\r\nHost: {place.netloc}\r\n{headers}\r\n".encode() + data)
        return reader, writer


@contextmanager
def observed_server(streams: int) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and the file to which it writes when its steps end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "step_times.py").write_text(EXTENSION)
        info = place / "step_times-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: step_times\nVersion: 1.0\n")
        entry = "[specplug.extensions]\nstep_times = step_times:extension\n"
        (info / "entry_points.txt").write_text(entry)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        server = start_server(
            *("--max-running-requests", str(BATCH), "--max-queue", str(streams + BATCH)),
            PYTHONPATH=path,
            STEP_TIMES=str(place / "times"),
            SPECPLUG_DEBUG="",  # its checks would be the greater part
        )
        try:
            yield server, place / "times"
        finally:
            server.kill()


def steps_between(file: Path, began: float, ended: float) -> list[float]:
    """Seconds of each decode step of the whole batch in this time."""
    records = list(RECORD.iter_unpack(file.read_bytes()))
    return [
        end - start
        for (start, before), (end, size) in pairwise(records)
        if before == size == BATCH and began <= start and end <= ended
    ]


async def measure(client: Client, file: Path, streams: int, seconds: float) -> list[float]:
    """Seconds of the steps with so many other streams open."""
    sent = time.monotonic()
    tasks = [asyncio.create_task(drain(await client.open(**MEASURED)))]
    await asyncio.gather(*(client.open(**WAITING) for _ in range(streams)))
    if streams:
        tasks.append(asyncio.create_task(churn(client)))
    settled = sent + SETTLE - time.monotonic()
    assert settled > 0, "the streams took too long to open"
    await asyncio.sleep(settled)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    ended = time.monotonic()
    for task in tasks:
        assert not task.done(), "the batch ended before the measurement"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.idle()
    return steps_between(file, began, ended)


async def drain(reader: asyncio.StreamReader) -> None:
    """Read a stream."""
    while await reader.read(1 << 16):
        pass


async def churn(client: Client) -> None:
    """Hang up on a waiting stream, open another, ask for metrics; again and again."""
    chance = random.Random(0)
    while True:
        client.writers.pop(chance.randrange(1, len(client.writers))).close()
        await client.open(**WAITING)
        await client.get("/metrics")
        await asyncio.sleep(CHURN_SECONDS)


async def compare(
    server: ServerProcess, file: Path, streams: int, rounds: int, seconds: float
) -> dict[int, list[list[float]]]:
    """Measure with no other stream and with so many, in turn; seconds of steps, by round."""
    client = Client(server)
    found: dict[int, list[list[float]]] = {0: [], streams: []}
    await measure(client, file, 0, 1.0)  # to warm up
    for number in range(rounds):
        for others in sorted(found, reverse=number % 2 == 1):
            found[others].append(await measure(client, file, others, seconds))
    return found


def show(found: dict[int, list[list[float]]]) -> None:
    """Print the table."""
    print(head("other streams open", "steps", "median, ms", "99th percentile, ms", "rounds, ms"))
    for others, rounds in found.items():
        steps = [1000 * step for each in rounds for step in each]
        medians = " ".join(f"{1000 * statistics.median(each):.2f}" for each in rounds)
        last = statistics.quantiles(steps, n=100)[98]
        cells = others, f"{len(steps):,}", f"{statistics.median(steps):.2f}", f"{last:.2f}", medians
        print(line(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with observed_server(options.streams) as (server, file):
        asked = compare(server, file, options.streams, options.rounds, options.seconds)
        found = asyncio.run(asked)
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
