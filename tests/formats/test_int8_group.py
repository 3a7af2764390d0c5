"""The group-packed layout of a weight: [ceil(K/G), N, G]."""

from __future__ import annotations

import pytest
import torch

from farro.int8 import pack_groups, unpack_groups


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("n, k", [(1, 1), (7, 300), (5, 256), (0, 40), (3, 0), (2, 31)])
def test_round_trip(n, k, group_size, generator) -> None:
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    packed = pack_groups(codes.T.contiguous().T, group_size)
    groups = -(-k // group_size)
    assert packed.shape == (groups, n, group_size)
    assert packed.is_contiguous()
    assert torch.equal(unpack_groups(packed, k), codes)
    for row in range(n):
        for column in range(0, k, 17):
            place = packed[column // group_size, row, column % group_size]
            assert place == codes[row, column]
    assert int(packed.ne(0).sum()) == int(codes.ne(0).sum())  # the tail is zeros


def test_errors() -> None:
    codes = torch.zeros(5, 300, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"pack_groups: codes has shape \[1, 5, 300\]"):
        pack_groups(codes[None], 64)
    with pytest.raises(TypeError, match="pack_groups: codes has dtype float32; needed int8"):
        pack_groups(codes.float(), 64)
    with pytest.raises(TypeError, match="pack_groups: codes must be a tensor, got list"):
        pack_groups([[1]], 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pack_groups: group_size is 48"):
        pack_groups(codes, 48)
    with pytest.raises(ValueError, match=r"unpack_groups: packed has shape \[5, 300\]"):
        unpack_groups(codes, 300)
    with pytest.raises(ValueError, match="unpack_groups: k is 1000"):
        unpack_groups(pack_groups(codes, 64), 1000)
