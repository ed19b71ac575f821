"""A training, from the data to the measured network.

rows       the data's texts, and what the target writes -> ROWS
trainer    the frozen target, create_trainer
steps      batch -> loss -> Muon and AdamW, counted; saved every so often -> STATE
export     config.json and model.safetensors, as the algorithm's worker loads them
measured   accept lengths on held-out prompts
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specplug.algorithm import HELD_OUT_PROMPTS, AlgorithmInfo, SpecConfig, find_model, shipped_name
from specplug.bench.dataset import read_prompts
from specplug.config import EngineConfig
from specplug.errors import PluginError, UsageError, shown
from specplug.model.checkpoint import read_config
from specplug.model.loading import choose_dtype, load_tokenizer, read_target_config
from specplug.registry import Registry, SelectedAlgorithm, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.trainer import DraftFiles, Trainer, TrainingBatch
from specplug.training.acceptance import MEASURED_TOKENS, accept_lengths
from specplug.training.corpus import Text, read_texts, standard_library
from specplug.training.hidden_state_files import export_hidden_states
from specplug.training.progress import Progress
from specplug.training.ranks import Ranks, whole
from specplug.training.reading import can_read_ahead
from specplug.training.regeneration import choose_prompts, regenerate
from specplug.training.rows import SHORTEST, Rows
from specplug.training.saved_state import (
    ROWS,
    STATE,
    check_names,
    load_state,
    read_tensors,
    save_state,
    write_tensors,
)
from specplug.training.settings import TrainingSettings
from specplug.training.target import FrozenRuntime, FrozenTarget, context_len
from specplug.training.threads import choose_threads

TIMED = 20
"""Steps that are timed, after ``UNTIMED`` ones, to find how many fit into the time."""
UNTIMED = 3
READING_SHARE = 0.25
"""The most of the minutes that the target reads rows in before the first step, on a CPU."""
MEASURED_SHARE = 0.08
"""The share of the minutes that is left for the export and the accept lengths."""
HELD_BACK = 32
"""Prompts that accept lengths are measured on."""
TEXTS_ON_CPU = 9000
"""The most texts that are trained on there if the user says nothing: in a quarter of an hour a few
cores see each a few times, and its features, which take as long as a step, are computed once."""
WRITTEN = 512
"""Texts that the target writes if the user says nothing."""
GPU_ROWS = 32
"""How many times as many texts a step has on a GPU, which would wait for so few as on a CPU."""
REPORTS = 200
"""Points of the curves, at most."""
LEAST_RATE = 0.01
"""The learning rate at the end, as a share of the highest."""
MUON_RATE = 5
"""Muon's learning rate, as a multiple of AdamW's."""


class _Loss(nn.Module):
    """A trainer's loss as a module's forward, so that FSDP gathers the network once a step."""

    def __init__(self, trainer: Trainer, hooks: HookCalls) -> None:
        super().__init__()
        self.network = trainer.network
        self._of = hooks, trainer  # not an attribute by itself: its parameters would be listed

    def forward(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        hooks, trainer = self._of
        found = hooks.trainer_loss(trainer, batch)
        return found.loss, dict(found.metrics)


def learning_rate(step: int, total: int, peak: float, warm_up: int) -> float:
    """Return the rate of a step: it rises over ``warm_up`` steps, and falls as a cosine over all
    of ``total``."""
    rises = min(1.0, (step + 1) / max(warm_up, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    return peak * rises * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def uses_halves(precision: str, device: torch.device) -> bool:
    """Return whether products are computed in bfloat16."""
    if precision == "auto":
        return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return precision == "bfloat16"


class TrainingSession:
    """One training.

    Args:
        settings: what it is told.
        progress: is told how far it is, by the first rank alone.
        resume: go on with the training of ``settings.out``, from where it was saved and with the
            settings that it was begun with.

    Raises:
        UsageError: the algorithm cannot be trained, or a setting cannot be used.
        CheckpointError: the target, the network to go on from or the saved state is not there.

    Attributes:
        settings: as given, or as they were saved.
        ranks: that train together.
        trainer: the algorithm's.
        history: what was reported.
    """

    def __init__(
        self, settings: TrainingSettings, progress: Progress, *, resume: bool = False
    ) -> None:
        self._began = time.monotonic()
        self._progress = progress
        self._folder = settings.out / "training"
        if resume:
            told = read_tensors(self._folder / ROWS)[1]
            check_names(self._folder / ROWS, "values", told, ("prompts", "settings"))
            known = settings.as_plain()
            check_names(self._folder / ROWS, "settings", told["settings"], known)
            settings = TrainingSettings.of_plain(told["settings"], settings.out)
        check_length(settings.length)
        self.settings = settings
        self._selected: SelectedAlgorithm = Registry().select(settings.algorithm)
        self.ranks = Ranks.join(settings.device)
        self._model = find_model(settings.model)
        self._context_len = context_len(read_config(self._model).get_text_config())
        self._engine = EngineConfig(
            model=self._model, device=str(self.ranks.device), dtype=settings.dtype
        )
        tokenizer = load_tokenizer(self._engine)
        rows, self._prompts = self._make_rows(tokenizer, resume)
        self._tell("loading the target", 0, 0)
        torch.manual_seed(settings.seed)
        self._target = target = FrozenTarget(
            self._model, choose_dtype(settings.dtype, self.ranks.device), self.ranks.device
        )
        self._runtime = FrozenRuntime(
            target, self._config(self._selected.info), rows, settings.options, tokenizer
        )
        manager = build_plugin_manager(self._selected, (), CoreDefaults())
        self._hooks = HookCalls(manager, self._selected)
        self.trainer = self._hooks.create_trainer(self._runtime)
        self._runtime.check_options()
        self._rows = rows
        times = 1 if self.ranks.is_on_cpu else GPU_ROWS
        self._size = settings.rows or self.trainer.rows * times
        if self._size % self.ranks.size:
            raise UsageError(
                f"--rows {self._size}: expected a multiple of {self.ranks.size}, the number of "
                "processes"
            )
        self._halves = uses_halves(settings.precision, self.ranks.device)
        self._module = _Loss(self.trainer, self._hooks)
        self.ranks.shard(self._module)
        self._optimizers = self._make_optimizers()
        self.history: list[dict[str, Any]] = []
        self._step, self._total = 0, settings.steps
        self._rows_read: int | None = None
        if resume and (self._folder / STATE).is_file():  # else it ended before its first step
            told = load_state(self._folder / STATE, self._module.network, self._optimizers)
            self._step, self._total = told["step"], told["total"]
            self.history = told["history"]
            self._rows_read = told["rows_read"]
            torch.set_num_threads(told["threads"])  # the same sums

    # Rows

    def _make_rows(self, tokenizer: Any, resume: bool) -> tuple[Rows, list[Any]]:
        """Return the rows and the held-out prompts. The first rank makes them, and all read what it
        has written, as a resume does."""
        if self.ranks.is_first and not resume:
            rows, prompts = self._new_rows(tokenizer)
            (self._folder / STATE).unlink(missing_ok=True)  # of a training that was here before
            kept = {"prompts": prompts, "settings": self.settings.as_plain()}
            write_tensors(self._folder / ROWS, rows.as_tensors(), kept)
        self.ranks.wait()
        tensors, told = read_tensors(self._folder / ROWS)
        check_names(
            self._folder / ROWS, "tensors", tensors, [each.name for each in attrs.fields(Rows)]
        )
        return Rows.read(tensors), told["prompts"]

    def _new_rows(self, tokenizer: Any) -> tuple[Rows, list[Any]]:
        settings = self.settings
        self._tell("reading the data", 0, 0)
        left_out: list[Path] = []
        texts = read_texts(settings.data or standard_library(), tokenizer, left_out.append)
        if left_out:
            named = ", ".join(map(str, left_out[:3])) + (", …" if left_out[3:] else "")
            self._say(f"not UTF-8, so left out of the data: {len(left_out)} file(s) ({named})")
        length = min(settings.length, self._context_len)
        if length < settings.length:
            self._say(f"rows of at most {length} tokens, the target's context")
        texts, prompts = self._hold_out(texts)
        own = Rows.of(texts, length)
        count, most = self._num_written(texts), self._most_own_texts()
        if not count:
            check_rows(own, texts, settings)
            rows = own if most is None else own.chosen(most, settings.seed)
            rows = self._with_repeated(rows, own)
            self._say(f"{len(rows)} rows of the data, {rows.num_tokens} tokens")
            return rows, prompts
        begun = time.monotonic()
        chosen = choose_prompts(texts, count, length, settings.seed)
        together = 64 if self.ranks.is_on_cpu else 1024
        engine = attrs.evolve(self._engine, max_running_requests=together)
        written = Rows.of(
            regenerate(
                engine,
                chosen,
                length,
                settings.seed,
                lambda done, total: self._tell("the target writes texts", done, total),
            ),
            length,
        )
        share = min(settings.corpus, 0.99)
        others = round(len(written) * share / (1 - share)) if len(written) else len(own)
        if most is not None:
            others = min(others, max(most - len(written), 0))
        rows = written.joined(own.chosen(others, settings.seed))
        check_rows(rows, texts, settings)
        rows = self._with_repeated(rows, own)
        self._say(
            f"{len(written)} texts of {written.num_tokens} tokens that the target wrote in "
            f"{time.monotonic() - begun:.0f} s; {len(rows)} rows of {rows.num_tokens} tokens"
        )
        return rows, prompts

    def _num_written(self, texts: list[Text]) -> int:
        """Return how many texts the target is to write."""
        if self.settings.regenerate is not None:
            return self.settings.regenerate
        are_texts = all(text.cuts is None for text in texts)
        return 0 if self.ranks.is_on_cpu and are_texts else WRITTEN

    def _most_own_texts(self) -> int | None:
        """Return the most texts that are trained on beside those that repeat; None: no limit."""
        most = self.settings.texts or (TEXTS_ON_CPU if self.ranks.is_on_cpu else None)
        return max(1, round(most * (1 - self.settings.repeat))) if most else None

    def _with_repeated(self, rows: Rows, own: Rows) -> Rows:
        """Return the rows, and some of pieces of the data's own that are repeated. Data of prompts
        alone have none of their own."""
        if not len(own):
            return rows
        share = min(self.settings.repeat, 0.99)
        return rows.joined(own.repeated(round(len(rows) * share / (1 - share)), self.settings.seed))

    def _hold_out(self, texts: list[Text]) -> tuple[list[Text], list[Any]]:
        """Return the texts to train on, and the prompts to measure on."""
        settings = self.settings
        own = shipped_name(self._model) != self._model
        if settings.prompts is not None or own:
            found = read_prompts(settings.prompts or HELD_OUT_PROMPTS)[:HELD_BACK]
            return texts, [prompt.content for prompt in found]
        begun = [text for text in texts if beginning(text)]
        held = begun[:: max(2, len(begun) // HELD_BACK)][:HELD_BACK]
        if len(begun) < 2 * len(held):
            held = begun  # too few to do without any
        else:
            kept = {id(text) for text in held}
            texts = [text for text in texts if id(text) not in kept]
        # As engines cut a chat: what is written follows its end.
        most = max(1, self._context_len - MEASURED_TOKENS)
        return texts, [beginning(text)[-most:] for text in held]

    def _config(self, info: AlgorithmInfo) -> SpecConfig:
        steps = self.settings.num_steps or info.defaults.num_steps
        return SpecConfig(
            algorithm=info.name,
            num_steps=steps,
            num_draft_tokens=steps + 1,
            draft_model_path=self.settings.start,
            target_config=read_target_config(self._model),
        )

    # Steps

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Make Muon for the trainer's ``orthogonal`` matrices, and AdamW for all other parameters.
        The decay is of matrices alone."""
        orthogonal = self._orthogonal()
        theirs = {id(parameter) for parameter in orthogonal}
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in theirs]
        decay = self.settings.weight_decay
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))]
        if orthogonal:
            found.append(torch.optim.Muon(orthogonal, lr=0.0, weight_decay=decay))
        return found

    def _orthogonal(self) -> list[nn.Parameter]:
        """Return the trainer's ``orthogonal`` matrices, each once, less those that are frozen.

        Raises:
            PluginError: something of it is no matrix of the network.
        """
        network = {id(parameter) for parameter in self.trainer.network.parameters()}
        found = {}
        for each in self._hooks.orthogonal(self.trainer):
            if id(each) not in network or each.ndim != 2:
                shape = tuple(each.shape) if isinstance(each, torch.Tensor) else shown(each)
                raise PluginError(
                    f"{self._selected.entry.subject}: orthogonal() of its trainer returned "
                    f"{shape}; expected parameters of its network with two dimensions; fix the "
                    "plugin, or tell its author"
                )
            if each.requires_grad:
                found[id(each)] = each
        return list(found.values())

    def _try_out(self) -> None:
        """Do what a step does, but the optimizer's part, which would change the network."""
        rows = self._runtime.rows.indices(0, self._size, self.settings.seed)
        with self._autocast():
            loss, _ = self._module(self._runtime.batch(rows))
        loss.backward()
        self._module.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Take all steps that are left, saving every so often and at the end."""
        if self._step == self._total:
            return
        if can_read_ahead(self.ranks.device) and self.ranks.size == 1:
            self._read_ahead()
        if self._step == 0 and self.ranks.is_on_cpu and self.ranks.size == 1:
            self._say(f"{choose_threads(self._try_out)} threads, the quickest on this machine")
        timed: list[float] = []
        seen: list[tuple[Tensor, dict[str, Tensor]]] = []
        while self._total is None or self._step < self._total:
            if self._total is None:
                timed.append(time.monotonic())
            seen.append(self._train_step())
            self._step += 1
            if self._total is None and len(timed) == UNTIMED + TIMED:
                self._plan((time.monotonic() - timed[UNTIMED]) / TIMED)
            if self._total is not None and self._is_due(max(1, self._total // REPORTS)):
                self._report(seen)
                seen = []
            if self._total is not None and self._is_due(self.settings.save_every):
                self.save()
        self.save()

    def _is_due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self._total

    def _read_ahead(self) -> None:
        """Run the target over the rows that the steps will take, in the order of the first epoch.
        Where steps are as many as fit it may take a share of the minutes, and rows that were not
        read by then are left out; a resume leaves out the same ones."""
        rows, size, seed = self._rows, self._size, self.settings.seed
        order, most_seconds = rows.indices(0, len(rows), seed), math.inf
        if self._rows_read is not None and self._rows_read < len(rows):
            self._runtime.rows = rows.picked(order[: self._rows_read])
            order = torch.arange(self._rows_read)
        if self._total is None:
            most_seconds = READING_SHARE * self._seconds_left()
        else:
            order = order[: self._total * size]
        begun = time.monotonic()
        with self._autocast():
            self._runtime.read_ahead(
                order, most_seconds, lambda *at: self._tell("the target reads rows", *at)
            )
        self._rows_read = len(self._runtime.rows)
        left_out = f"; {len(rows) - self._rows_read} are left out" * (self._rows_read < len(rows))
        self._say(f"the target read its rows in {time.monotonic() - begun:.0f} s{left_out}")

    def _minutes(self) -> float:
        return self.settings.minutes or 15.0

    def _seconds_left(self) -> float:
        """Return how much of the minutes is left for reading and for steps."""
        used = time.monotonic() - self._began
        return self._minutes() * 60 * (1 - MEASURED_SHARE) - used

    def _plan(self, seconds: float) -> None:
        """Settle how many steps of these seconds there are in the minutes that are left. It is
        saved, so that a resume ends where this would have ended."""
        steps = max(int(self._seconds_left() / seconds), 1)
        self._total = int(self.ranks.agree(self._step + steps))
        self._say(f"{self._total} steps of {seconds:.3f} s fit into {self._minutes():g} minutes")

    def _train_step(self) -> tuple[Tensor, dict[str, Tensor]]:
        settings, step = self.settings, self._step
        torch.manual_seed(settings.seed * 1_000_003 + step * self.ranks.size + self.ranks.rank)
        # While the number of steps is not known the rate rises, which does not depend on it.
        total = self._total or 10**9
        warm_up = (
            settings.warm_up
            if self._total is None
            else min(settings.warm_up, max(1, self._total // 10))
        )
        peak = settings.learning_rate or self.trainer.learning_rate
        rate = learning_rate(step, total, peak, warm_up)
        for optimizer in self._optimizers:
            muon = isinstance(optimizer, torch.optim.Muon)
            for group in optimizer.param_groups:
                group["lr"] = MUON_RATE * rate if muon else rate
        indices = self._runtime.rows.indices(step, self._size, settings.seed)
        with self._autocast():
            batch = self._runtime.batch(self.ranks.share(indices), step, self.ranks.mean_total)
            loss, metrics = self._module(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), {name: value.detach() for name, value in metrics.items()}

    def _autocast(self) -> torch.autocast:
        kind = self.ranks.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self._halves)

    def _report(self, seen: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> None:
        """Note the mean of some steps in the history, and tell it."""
        mean = self.ranks.mean_total
        told: dict[str, Any] = {"step": self._step}
        told["loss"] = float(mean(torch.stack([loss for loss, _ in seen]).mean()))
        for name in seen[-1][1]:
            values = mean(torch.stack([metrics[name] for _, metrics in seen]).mean(0))
            told[name] = [round(value, 4) for value in values.flatten().tolist()]
        self.history.append(told)
        shares = [f"{k} {' '.join(f'{x:.3f}' for x in v)}" for k, v in told.items()
                  if isinstance(v, list)]  # fmt: skip
        line = f"loss {told['loss']:.3f}  {'  '.join(shares)}"
        self._tell("training", self._step, self._total or 0, line)

    def export_hidden_states(self, folder: Path) -> None:
        """Write the target's hidden states over all rows, for trainers elsewhere, by the first rank
        alone."""
        if self.ranks.is_first:
            export_hidden_states(
                self._target,
                self._rows,
                folder,
                lambda done, total: self._tell("writing hidden states", done, total),
            )
        self.ranks.wait()

    def save(self) -> None:
        """Write the state that a resume begins from. All ranks call it."""
        told = {
            "step": self._step,
            "total": self._total,
            "history": self.history,
            "threads": torch.get_num_threads(),
            "rows_read": self._rows_read,
        }
        save_state(self._folder / STATE, self._module.network, self._optimizers, told, self.ranks)
        self.ranks.wait()

    # The end

    def export(self) -> None:
        """Write the network as it is published, in the target's dtype on disk or bfloat16, and the
        curves. All ranks call it."""
        files = self._hooks.trainer_files(self.trainer)
        tensors = {name: whole(tensor) for name, tensor in files.tensors.items()}
        if self.ranks.is_first:
            write_draft(self.settings.out, attrs.evolve(files, tensors=tensors))
            if self.history:
                self._draw()
        self.ranks.wait()

    def _draw(self) -> None:
        try:
            from specplug.training import curves
        except ImportError:
            self._say("curves.png needs matplotlib: pip install 'specplug[bench]'")
            return
        title = f"{self._selected.name} for {Path(self._model).name}"
        curves.save(title, self.history, self.settings.out / "curves.png")

    def measure(self) -> dict[float, float]:
        """Return the accept lengths of the exported network by temperature. The first rank alone
        measures; the others get nothing.
        It is empty where no text has a beginning."""
        if not (self.ranks.is_first and self._prompts):
            return {}
        self._tell("measuring accept lengths", 0, 0)
        return accept_lengths(
            self._selected.name,
            self.settings.out,
            self._prompts,
            model=self._model,
            device=str(self.ranks.device),
            num_steps=self.settings.num_steps,
        )

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.leave()

    def _tell(self, part: str, done: int, total: int, told: str = "") -> None:
        if self.ranks.is_first:
            self._progress(part, done, total, told)

    def _say(self, line: str) -> None:
        if self.ranks.is_first:
            self._progress.say(line)


def beginning(text: Text) -> list[int]:
    """Return the tokens that the target goes on from where accept lengths are measured: a prompt,
    what is before the first assistant's turn, or 64 tokens. There may be none."""
    return list(text.token_ids[: text.cuts[0] if text.cuts else 64])


def check_length(length: int) -> None:
    """Refuse rows that are too short to be kept.

    Raises:
        UsageError: they are.
    """
    if length < SHORTEST:
        raise UsageError(
            f"--length {length}: expected at least {SHORTEST}; shorter rows are left out"
        )


def check_rows(rows: Rows, texts: Sequence[Text], settings: TrainingSettings) -> None:
    """Refuse data of which no row can be made.

    Raises:
        UsageError: there is no row.
    """
    if not len(rows):
        named = ", ".join(map(str, settings.data)) or "of the standard library"
        raise UsageError(
            f"data {named}: {len(texts)} texts, but no row to train on; expected a text, a "
            f"response or an assistant's turn of {SHORTEST} tokens or more; give longer "
            "texts, or with prompts alone --regenerate and a --length of more than their 4/3"
        )


def write_draft(folder: Path, files: DraftFiles) -> None:
    """Write ``config.json`` and ``model.safetensors``, whose floating tensors are bfloat16, and a
    tokenizer, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(files.config), indent=2) + "\n")
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in files.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if files.tokenizer is not None:
        files.tokenizer.save_pretrained(folder)
