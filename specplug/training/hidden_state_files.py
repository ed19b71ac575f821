"""Hidden states of the target on disk, as ``speculators`` reads them.

A folder has ``hidden_states/hs_0.safetensors`` and so on, a file for each text: ``token_ids`` [T]
and ``hidden_states`` [T, layers, H], of which the last layer's are those before the final norm.
Beside them ``rows.jsonl`` has a line for each, {"input_ids", "loss_mask", "seq_len"}, which
``datasets`` turns into the Arrow folder of that trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from specplug.training.rows import Rows
from specplug.training.target import FrozenTarget


def export_hidden_states(
    target: FrozenTarget, rows: Rows, folder: Path, progress: Callable[[int, int], None]
) -> None:
    """Write the hidden states of all rows, before the layers that were captured and after the last
    one.

    Args:
        target: of which a trainer has captured layers; if it has none, a low, a middle and a high
            one are taken.
        folder: is made.
        progress: is told how many rows are written.
    """
    count = len(target.capture.layers)
    chosen = target.capture.layer_ids or (min(2, count), count // 2, max(count - 3, 0))
    name = target.capture.keep_layer_inputs((*(i for i in chosen if i != count), count))
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as lines:
        for index in range(len(rows)):
            length = int(rows.lengths[index])
            tokens = rows.tokens[index, :length].long()
            found = target.run(tokens.unsqueeze(0).to(target.device))[name]
            tensors = {
                "token_ids": tokens,
                "hidden_states": found.view(length, -1, target.config.hidden_size).cpu(),
            }
            if tensors["hidden_states"].dtype == torch.float64:
                tensors["hidden_states"] = tensors["hidden_states"].float()
            save_file(tensors, states / f"hs_{index}.safetensors")
            mask = rows.learnt[index, :length].int().tolist()
            row = {"input_ids": tokens.tolist(), "loss_mask": mask, "seq_len": length}
            lines.write(json.dumps(row) + "\n")
            progress(index + 1, len(rows))
