"""Deliberate breaks: what a careless maintainer could do to the product, and whether a test tells.

Each break is one edit of one file. It is applied in a copy of the tree, and the tests that ought to
notice run there until the first one fails:

    python benchmarks/breaks.py                     all of them, a table at the end
    python benchmarks/breaks.py top-p kv-move       these
    python benchmarks/breaks.py --list

It ends with 1 if a break was caught by no test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 900
"""Seconds that the tests of one break may take."""


@attrs.frozen
class Break:
    """One edit.

    Attributes:
        name: of the break.
        file: that it changes.
        old: what stands there, exactly once.
        new: what stands there then.
        tests: files and folders whose tests ought to notice, the quickest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Edit the file of the tree at ``root``.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"break {self.name}: {self.file} has its old text {found} times; expected once: "
                "take over what the code has become"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@attrs.frozen
class Outcome:
    """What the tests said of a break.

    Attributes:
        test: the one that failed first; empty if none did.
        seconds: that they took.
        problem: why nothing can be said, or empty.
    """

    test: str
    seconds: float
    problem: str = ""


BREAKS = (
    # Acceptance, compaction, and where nodes stand
    Break(
        "verify-chain",
        "specplug/speculative/verify.py",
        "accept_lens = right.to(torch.int64).cumprod(1).sum(1) + 1",
        "accept_lens = right.to(torch.int64).sum(1) + 1",
        ("tests/speculative/test_verify.py", "tests/engine/test_exactness.py"),
    ),
    Break(
        "verify-parent",
        "specplug/speculative/verify.py",
        "        follows[:, 1:] &= parents[:, 1:] == local[:, :-1]\n",
        "",
        ("tests/speculative/test_verify.py", "tests/engine/test_plugin_failures.py"),
    ),
    Break(
        "compaction",
        "specplug/speculative/verify.py",
        "per_node={name: tensor[accepted.rows] for name, tensor in per_node.items()}",
        "per_node={name: tensor[: len(accepted.rows)] for name, tensor in per_node.items()}",
        ("tests/speculative/test_verify.py", "tests/engine/test_exactness.py"),
    ),
    Break(
        "kv-move",
        "specplug/engine/step.py",
        "move_slots(pool, source.view(-1), target.view(-1))",
        "move_slots(pool, target.view(-1), source.view(-1))",
        ("tests/engine/test_exactness.py",),
    ),
    Break(
        "ancestor-mask",
        "specplug/speculative/draft.py",
        "    while reach < depth:\n",
        "    while 2 * reach < depth:\n",
        ("tests/speculative/test_draft.py", "tests/speculative/test_verify.py"),
    ),
    Break(
        "node-positions",
        "specplug/engine/step.py",
        "positions=None if draft.is_chain else starts.unsqueeze(1) + draft.depths,",
        "positions=None,",
        ("tests/engine/test_exactness.py",),
    ),
    # The sampler
    Break(
        "noise-position",
        "specplug/engine/step.py",
        "positions = positions + 1",
        "positions = positions + 0",
        ("tests/engine/test_exactness.py",),
    ),
    Break(
        "penalties-of-a-path",
        "specplug/model/sampler.py",
        "        if draft is not None:\n            counts",
        "        if draft is not None and draft.is_chain:\n            counts",
        ("tests/model/test_sampler.py", "tests/engine/test_exactness.py"),
    ),
    Break(
        "penalties-after-retraction",
        "specplug/engine/engine.py",
        "        output: Sequence[int] = request.output_token_ids\n        if request.status",
        "        known = request.output_token_ids\n"
        "        output = known if request.status is RequestStatus.RUNNING else ()\n"
        "        if request.status",
        ("tests/model/test_sampler.py", "tests/engine/test_exactness.py", "tests/test_pressure.py"),
    ),
    Break(
        "top-p",
        "specplug/model/sampler.py",
        "(probs.cumsum(-1) - probs >= top_p)",
        "(probs.cumsum(-1) >= top_p)",
        ("tests/model/test_sampler.py", "tests/engine/test_exactness.py"),
    ),
    # Steps in flight
    Break(
        "future-map-absent-state",
        "specplug/speculative/future_map.py",
        "                buffer.index_fill_(0, req_indices, 0)",
        "                continue",
        ("tests/speculative/test_future_map.py", "tests/speculative/test_draft_state.py"),
    ),
    Break(
        "overlap-step-too-many",
        "specplug/engine/request.py",
        "sure = len(self.output_token_ids) + self.in_flight",
        "sure = len(self.output_token_ids)",
        (
            "tests/engine/test_overlap.py",
            "tests/engine/test_scheduler.py",
            "tests/test_pressure.py",
        ),
    ),
    # The scheduler
    Break(
        "retraction-order",
        "specplug/engine/scheduler.py",
        "self.running[self.running.index(short) + 1 :] or [short]",
        "self.running[1:] or [short]",
        ("tests/engine/test_scheduler.py",),
    ),
    Break(
        "fair-shares",
        "specplug/engine/scheduler.py",
        "self._short(requests, slots + 1)[:left]",
        "self._short(requests, slots + 1)[:0]",
        ("tests/engine/test_scheduler.py", "tests/test_pressure.py"),
    ),
    # The prefix cache
    Break(
        "cache-key",
        "specplug/kv/prefix_cache.py",
        "return (kind, *own) if kind and not start else tuple(own)",
        "return tuple(own)",
        ("tests/kv/test_prefix_cache.py", "tests/model/test_rotary.py"),
    ),
    Break(
        "cache-lookahead",
        "specplug/kv/prefix_cache.py",
        "for start in range(0, most - size + 1, size):",
        "for start in range(0, most - size - self.lookahead + 1, size):",
        ("tests/kv/test_prefix_cache.py",),
    ),
    Break(
        "cache-eviction-order",
        "specplug/kv/prefix_cache.py",
        "            used.last_used = self._clock\n",
        "",
        ("tests/kv/test_prefix_cache.py",),
    ),
    # Prefill in chunks, idle ranks, hooks
    Break(
        "chunk-tails",
        "specplug/speculative/rotation.py",
        "if all(batch.last_chunk):",
        "if any(batch.last_chunk):",
        ("tests/speculative/test_rotation.py", "tests/engine/test_exactness.py"),
    ),
    Break(
        "idle-fixup",
        "specplug/speculative/draft_state.py",
        "        state[name] = empty\n",
        "        state.setdefault(name, empty)\n",
        ("tests/speculative/test_draft_state.py", "tests/engine/test_plugin_failures.py"),
    ),
    Break(
        "hook-check-size",
        "specplug/speculative/hook_results.py",
        "            and len(tensor) == size\n",
        "",
        ("tests/engine/test_plugin_failures.py", "tests/engine/test_contract.py"),
    ),
    Break(
        "plugin-error-names-extension",
        "specplug/speculative/plugin_guard.py",
        "subject = self._answered or self._subject",
        "subject = self._subject",
        ("tests/engine/test_plugin_failures.py", "tests/engine/test_contract.py"),
    ),
    Break(
        "draft-out-of-vocabulary",
        "specplug/speculative/draft.py",
        "self.tokens.clamp(0, vocab_size - 1)",
        "self.tokens.clone()",
        ("tests/speculative/test_draft.py", "tests/engine/test_hostile_drafter.py"),
    ),
    # Text and grammars
    Break(
        "stop-string-in-another",
        "specplug/engine/stop_strings.py",
        "self.found[following] = self.found[following] or self.found[shorter]",
        "pass",
        ("tests/engine/test_stop_strings.py", "tests/engine/test_detokenizer.py"),
    ),
    Break(
        "grammar-dead-row",
        "specplug/grammar/state.py",
        "        masks.masked_fill_((masks == 0).all(1, keepdim=True), -1)\n",
        "",
        ("tests/grammar/test_compiler.py", "tests/grammar/test_structured_output.py"),
    ),
    # The target
    Break(
        "rotary-length",
        "specplug/engine/request.py",
        "self.rotary_len = known if rule.recomputes else len(self.prompt_token_ids)",
        "self.rotary_len = known",
        ("tests/model/test_rotary.py",),
    ),
    Break(
        "checkpoint-layer-too-many",
        "specplug/model/checkpoint.py",
        "int(found[1]) >= config.num_hidden_layers + drafting",
        "int(found[1]) > config.num_hidden_layers + drafting",
        ("tests/model/test_checkpoint.py",),
    ),
    Break(
        "model-check-far-mask",
        "specplug/model/model_check.py",
        "        if not same:\n",
        "        if same is None:\n",
        ("tests/model/test_model_check.py", "tests/test_architectures.py"),
    ),
    # What requests are handed
    Break(
        "experts-told-twice",
        "specplug/engine/collected_output.py",
        "{name: tensor[known:] for name, tensor in tensors.items()} if known else tensors",
        "tensors",
        ("tests/model/test_routed_experts.py",),
    ),
    Break(
        "experts-of-cached-tokens",
        "specplug/engine/scheduler.py",
        "return min([most, *(each.num_reusable for each in request.outputs.values())])",
        "return most",
        ("tests/model/test_routed_experts.py",),
    ),
    Break(
        "logprobs-of-a-neighbour",
        "specplug/engine/core_outputs.py",
        "return tensor[:, : 1 + want]",
        "return tensor",
        ("tests/model/test_sampler.py", "tests/engine/test_exactness.py"),
    ),
    # Disaggregation and ranks
    Break(
        "slice-not-final",
        "specplug/engine/kv_transfer.py",
        "end = chunk.end if chunk.is_last else max(start, chunk.end - self._lookahead)",
        "end = chunk.end",
        ("tests/disagg/test_exactness.py", "tests/disagg/test_draft_state.py"),
    ),
    Break(
        "draft-state-last",
        "specplug/speculative/draft_state.py",
        "row[self.shape[0] - count :].copy_(tensor[tensor.shape[0] - count :])",
        "row[:count].copy_(tensor[tensor.shape[0] - count :])",
        ("tests/speculative/test_draft_state.py", "tests/disagg/test_draft_state.py"),
    ),
    Break(
        "write-before-floor",
        "specplug/speculative/paged_plan.py",
        "torch.where(index >= self.requests.floors[row], slots, 0)",
        "torch.where(index >= 0, slots, 0)",
        ("tests/speculative/test_paged_plan.py", "tests/kv/test_prefix_cache.py"),
    ),
    Break(
        "rows-of-a-rank",
        "specplug/distributed/rank_group.py",
        "start = self.rank * max(self._rows)",
        "start = sum(self._rows[: self.rank])",
        ("tests/distributed/test_rank_channel.py", "tests/distributed/test_dp_attention.py"),
    ),
    # The server and the commands
    Break(
        "server-held-bodies",
        "specplug/serve/limits.py",
        "            self._held -= len(body)\n",
        "            self._held = max(self._held, 0)\n",
        ("tests/serve/test_limits.py", "tests/serve/test_connections.py"),
    ),
    Break(
        "disconnected-stream",
        "specplug/serve/application.py",
        "        finally:\n            self._stream.close()\n",
        "        finally:\n            del scope\n",
        ("tests/serve/test_disconnects.py",),
    ),
    Break(
        "stream-without-end",
        "specplug/serve/replies.py",
        "if new.text or new.calls or new.finish_reason or (tokens and new.token_ids):",
        "if new.text or new.calls or (tokens and new.token_ids):",
        ("tests/serve/test_completions.py", "tests/serve/test_exactness.py"),
    ),
    Break(
        "json-beside-prints",
        "specplug/cli/standard_output.py",
        "    sys.stdout = sys.stderr\n    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)\n    try:",
        "    sys.stdout = sys.stderr\n    try:",
        ("tests/cli/test_standard_output.py", "tests/cli/test_foreign_code.py"),
    ),
    Break(
        "plugin-that-exits",
        "specplug/registry.py",
        "except BaseException as error:\n        let_ctrl_c_pass(error)\n        return None, imp",
        "except Exception as error:\n        let_ctrl_c_pass(error)\n        return None, imp",
        ("tests/test_registry.py", "tests/cli/test_wrong_packages.py"),
    ),
    Break(
        "pin-that-does-not-fit",
        "constraints.txt",
        "triton==3.7.1",
        "triton==3.6.0",
        ("tests/test_constraints.py",),
    ),
    # The plugins
    Break(
        "eagle-tree-places",
        "specplug/speculative/drafter.py",
        "places=best + topk + (step - 1) * beam * topk,",
        "places=best + topk + (step - 1) * topk * topk,",
        ("plugins/eagle/tests", "plugins/eagle3/tests", "tests/test_draft_context.py"),
    ),
    Break(
        "eagle3-d2t",
        "plugins/eagle3/specplug_eagle3/worker.py",
        "token_ids=order + self.network.d2t,",
        "token_ids=order,",
        ("plugins/eagle3/tests",),
    ),
    Break(
        "multi-layer-shift",
        "plugins/multi_layer_eagle/specplug_multi_layer_eagle/worker.py",
        "tails = chunk_tails(batch, index + 1, chain[-1][:, 0])",
        "tails = chunk_tails(batch, 1, chain[-1][:, 0])",
        ("plugins/multi_layer_eagle/tests", "tests/test_draft_context.py"),
    ),
    Break(
        "dflash-window",
        "plugins/dflash/specplug_dflash/worker.py",
        "of_layer, config.windows)\n",
        "of_layer)\n",
        ("plugins/dflash/tests",),
    ),
    Break(
        "ngram-overwritten",
        "plugins/ngram/specplug_ngram/history.py",
        "            if place <= oldest or self._tokens",
        "            if not place or self._tokens",
        ("plugins/ngram/tests",),
    ),
)


def copy_tree(root: Path, into: Path) -> None:
    """Copy what git knows of the tree at ``root``, or would add to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target)


def run_break(each: Break, root: Path) -> Outcome:
    """Apply a break in a copy of the tree at ``root`` and run its tests there."""
    with tempfile.TemporaryDirectory(prefix="specplug-break-") as folder:
        copy = Path(folder)
        copy_tree(root, copy)
        each.apply(copy)
        places = [copy, *sorted(copy.glob("plugins/*/"))]
        path = os.pathsep.join(map(str, places))
        environment = {**os.environ, "PYTHONPATH": path, "SPECPLUG_FIRST_FAILURE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "--no-header"]
        started = time.perf_counter()
        try:
            result = subprocess.run(
                [*command, *each.tests],
                cwd=copy,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome("", _LIMIT, f"no end within {_LIMIT} s")
        seconds = time.perf_counter() - started
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    if failed is not None:
        return Outcome(failed[1], seconds)
    if result.returncode:
        lines = result.stdout.strip().splitlines()
        return Outcome("", seconds, lines[-1] if lines else f"exit status {result.returncode}")
    return Outcome("", seconds)


def main() -> int:
    """Run the breaks that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of breaks; all if none is given")
    parser.add_argument("--list", action="store_true", help="name them, and end")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree (this one)")
    options = parser.parse_args()
    known = {each.name: each for each in BREAKS}
    for name in options.names:
        if name not in known:
            parser.error(f"no break {name!r}; expected some of: {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(BREAKS)
    if options.list:
        print("\n".join(f"{each.name}: {each.file}" for each in chosen))
        return 0
    print("| break | file | caught by | seconds |\n| --- | --- | --- | --- |")
    missed = 0
    for each in chosen:
        try:
            outcome = run_break(each, options.root.resolve())
        except ValueError as error:  # the code has changed: the others still tell
            outcome = Outcome("", 0.0, str(error))
        missed += not outcome.test
        told = outcome.test or f"**no test** {outcome.problem}".strip()
        print(f"| {each.name} | {each.file} | {told} | {outcome.seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
