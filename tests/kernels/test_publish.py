"""What a launch says of requests is what torch says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specplug import CommittedOutput, FutureMap
from specplug.kernels.kernel_table import kernels_used

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def _output(bs: int, columns: int) -> CommittedOutput:
    tokens = torch.arange(bs * columns, device=DEVICE) * 7 + 3
    lens = torch.arange(bs, device=DEVICE) % columns + 1
    last = torch.arange(bs, device=DEVICE) * columns + lens - 1
    return CommittedOutput(
        next_tokens=tokens,
        own_tokens=tokens - 1,
        last_rows=last,
        accept_lens=lens,
        bonus_tokens=tokens[last],
    )


@pytest.mark.parametrize("columns", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [(4,), (1, 5, 3), (2, 6, 1, 8, 7), ()])
def test_publish_says_what_torch_says(rows: tuple[int, ...], columns: int) -> None:
    """By step and by lengths; the other rows keep what they had."""
    found = []
    for mode in ("triton", "torch"):
        with kernels_used(mode):
            future_map = FutureMap(9, DEVICE)
            everyone = torch.arange(9, device=DEVICE)
            future_map.seq_lens.copy_(everyone + 100)
            future_map.bonus_tokens.copy_(everyone + 200)
            output, starts = _output(len(rows), columns), _ids(*(10 * row for row in rows))
            if rows:
                seq_lens, report = future_map.publish_step(_ids(*rows), starts, output)
            else:
                seq_lens, report = starts, starts
            known = future_map.resolve(everyone)
            future_map.publish(_ids(*rows), starts, output)
            again = future_map.resolve(everyone)
            found.append(
                [seq_lens, report, known[0], known[1].bonus_tokens, again[0], again[1].bonus_tokens]
            )
    for by_kernel, by_torch in zip(*found, strict=True):
        assert torch.equal(by_kernel, by_torch)


@kernels_used("triton")
def test_publish_refuses_tensors_of_other_sizes() -> None:
    """A plugin may have put them there."""
    output = _output(2, 1)
    output.bonus_tokens = output.bonus_tokens[:1]
    with pytest.raises(ValueError, match=r"expected \[bs\] of each"):
        FutureMap(4, DEVICE).publish(_ids(1, 2), _ids(5, 6), output)


@kernels_used("triton")
def test_requests_of_nobody_share_a_row() -> None:
    """A padded batch repeats row 0, which is nobody's."""
    future_map = FutureMap(4, DEVICE)
    seq_lens, report = future_map.publish_step(_ids(3, 0, 0), _ids(5, 0, 0), _output(3, 2))
    assert seq_lens.tolist() == [6, 2, 1]
    assert report.tolist() == [[3, 10, 1], [17, 24, 2], [31, 38, 1]]
    assert future_map.seq_lens[1:].tolist() == [0, 0, 6]
    assert future_map.bonus_tokens[3] == 3
