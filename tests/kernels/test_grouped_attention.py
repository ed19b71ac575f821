"""How a batch is divided into groups. That each row's result is right is tested with the plans."""

from __future__ import annotations

import pytest

from specplug.kernels.grouped_attention import GROUP_BYTES, group_requests


def test_requests_of_like_lengths_share_a_group() -> None:
    lengths = [900, 40, 905, 44, 910, 48]
    groups = group_requests([1] * 6, lengths, row_elements=160, row_bytes=8)
    assert [group.requests for group in groups] == [(1, 3, 5), (0, 2, 4)]
    assert [group.length for group in groups] == [48, 910]


def test_a_wide_and_a_narrow_request_share_no_group() -> None:
    groups = group_requests([200, 1, 190], [200, 200, 200], row_elements=160, row_bytes=8)
    assert [group.requests for group in groups] == [(1,), (2, 0)]
    assert [group.width for group in groups] == [1, 200]


@pytest.mark.parametrize("length", [1, 100, 5000])
def test_groups_fit_in_a_cache(length: int) -> None:
    row_bytes = 1280
    groups = group_requests([1] * 30, [length] * 30, row_elements=160, row_bytes=row_bytes)
    assert sorted(i for group in groups for i in group.requests) == list(range(30))
    most = max(1, GROUP_BYTES // (length * row_bytes))
    assert max(len(group.requests) for group in groups) == min(30, most)
    assert len(groups) == -(-30 // most)
