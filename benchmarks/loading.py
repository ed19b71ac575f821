"""What memory the loading of a checkpoint takes: the table of docs/loading.md.

    python benchmarks/loading.py FOLDER [--dtype float32] [--device cuda]

It prints the size of the weights, the seconds, and by how much this process grew at most meanwhile:
of its own (``RssAnon``), and of mapped files (``RssFile``). On a GPU also the device's peak. Linux
alone.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from specplug.model.checkpoint import load_checkpoint
from specplug.model.loading import choose_dtype
from specplug.model.quantization import stored_tensors

_KINDS = ("RssAnon", "RssFile")
_SAMPLE_SECONDS = 0.003


def resident() -> dict[str, int]:
    """Return the bytes of this process in memory, by kind."""
    status = Path("/proc/self/status").read_text()
    return {kind: 1024 * int(re.findall(rf"{kind}:\s+(\d+)", status)[0]) for kind in _KINDS}


@contextmanager
def peak() -> Iterator[dict[str, int]]:
    """Give a dictionary that has the growth at most, by kind, when the block is left."""
    before, most, done = resident(), dict.fromkeys(_KINDS, 0), threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            for kind, size in resident().items():
                most[kind] = max(most[kind], size - before[kind])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Load one checkpoint and print a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--dtype", default="auto", help="as EngineConfig's, auto on the CPU: files'"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    named = options.dtype != "auto"
    dtype = choose_dtype(options.dtype, device) if named else None
    config = transformers.AutoConfig.from_pretrained(options.folder)
    transformers.AutoModelForCausalLM._model_mapping[type(config)]  # import its class before
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the driver's part of the host's memory is not the model's
    began = time.perf_counter()
    with peak() as most:
        model = load_checkpoint(str(options.folder), dtype, device)
    seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for _, tensor in stored_tensors(model))
    line = (
        f"{options.folder.name} in {str(model.dtype).removeprefix('torch.')} on {device}: weights "
        f"{size / 1e6:,.0f} MB, {seconds:.1f} s; host at most {most['RssAnon'] / 1e6:,.0f} MB of "
        f"its own, {most['RssFile'] / 1e6:,.0f} MB of mapped files"
    )
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        line += f"; device at most {allocated / 1e6:,.0f} MB, reserved {reserved / 1e6:,.0f} MB"
    print(line)


if __name__ == "__main__":
    main()
