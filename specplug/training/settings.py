"""What a training is told. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class TrainingSettings:
    """The settings of a training. What is None is the trainer's default, or chosen by the core.

    Attributes:
        algorithm: whose draft network is trained.
        model: the target's folder or hub id; None: the default model.
        data: files of texts, prompts and chats (``corpus``); none: the Python standard library's
            own source, less the modules that the default model's held-out prompts are from.
        out: the folder of the trained network; what a resume needs is in its ``training`` folder.
        steps: of the optimizer; None: as many as fit into ``minutes``.
        minutes: of the whole training, with what comes before and after the steps.
        rows: texts of a step, in all processes together.
        length: the most tokens of a text.
        learning_rate: the highest, after the warm-up.
        weight_decay: of matrices.
        warm_up: steps in which the rate rises; no more than a tenth of all.
        texts: the most that are trained on; None: all, on a CPU so many that each is seen a few
            times in a quarter of an hour.
        regenerate: texts that the target writes; 0: it is trained on the data as they are; None:
            none on a CPU if the data are texts, else 512.
        corpus: the share of the data's own texts among the rows, 0 to 1, where texts were written.
        repeat: the share of rows that say a piece of the data again and again, 0 to 1.
        seed: of everything that is random.
        device: where it runs; None: CUDA if there is one.
        dtype: of the target: "auto" or torch's name.
        precision: of the network's products: "float32" or "bfloat16" (its weights are float32
            either way); "auto": bfloat16 on a GPU, and on a CPU that multiplies it.
        start: folder of the network to go on from; None: a new one.
        num_steps: the depth to train for; None: the algorithm's default.
        options: the trainer's own settings (``--set``).
        save_every: steps between two states that a resume can begin from.
        prompts: file of held-out prompts; None: those of the default model, or beginnings of texts
            of the data that are held out.
    """

    algorithm: str
    model: str | None = None
    data: tuple[Path, ...] = ()
    out: Path
    steps: int | None = None
    minutes: float | None = None
    rows: int | None = None
    length: int = 384
    learning_rate: float | None = None
    weight_decay: float = 0.3
    warm_up: int = 100
    texts: int | None = None
    regenerate: int | None = None
    corpus: float = 0.75
    repeat: float = 0.33
    seed: int = 0
    device: str | None = None
    dtype: str = "auto"
    precision: str = "auto"
    start: Path | None = None
    num_steps: int | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    save_every: int = 500
    prompts: Path | None = None

    def as_plain(self) -> dict[str, Any]:
        """Return what a resume needs of them, as JSON has it: all but the folder, which may have
        moved."""

        def plain(_: type[Any], __: Any, value: Any) -> Any:
            return str(value) if isinstance(value, Path) else value

        values = attrs.asdict(self, value_serializer=plain)
        return {name: value for name, value in values.items() if name != "out"}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any], out: Path) -> TrainingSettings:
        """Return what ``as_plain`` told of, for a folder."""
        paths = {
            name: Path(values[name]) for name in ("start", "prompts") if values[name] is not None
        }
        data = tuple(Path(file) for file in values["data"])
        return cls(**{**values, **paths, "data": data, "out": out})
