"""The drawings of docs/formats.md exist, and the bytes are where they say.

Each test reads a drawing from the page, so that a change of either is noticed, and works out from
what is drawn where every byte of a weight has to be.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from farro import nvfp4
from farro.formats.nvfp4 import E2M1_VALUES, NAN_SCALE, NO_ROW, decode_ue4m3
from farro.formats.paired_sparsity import PATTERNS
from farro.nn import SparseNVFP4Experts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/formats.md has no section {title!r}"
    return found[1]


def drawing(title: str, word: str) -> str:
    """The one fenced block of a section that has a word."""
    fences = re.findall(r"^```\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    (found,) = (text for text in fences if word in text)
    return found


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d*\.?\d+", text)]


def test_e2m1_and_ue4m3():
    text = drawing("NVFP4 in blocks of 32", "e2m1, 4 bits")
    assert tuple(numbers(re.search(r"^ +value (.*)$", text, re.MULTILINE)[1])) == E2M1_VALUES
    assert "s ee m" in text and "8 + c is -value(c)" in text
    assert "e = 0: mmm * 2^-9, else (8 + mmm) * 2^(e-10)" in text
    for byte in range(0x7F):
        e, m = byte >> 3, byte & 7
        value = m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
        assert decode_ue4m3(torch.tensor(byte, dtype=torch.uint8)) == value
    assert "largest 0x7e = 448" in text and value == 448
    assert f"{NAN_SCALE:#x} NaN" in text and f"{NO_ROW:#x} (1.0)" in text


def test_packed_codes():
    text = drawing("NVFP4 in blocks of 32", "packed codes")
    assert "bits 3..0  code of K = 2i,  bits 7..4  code of K = 2i + 1" in text
    w = torch.zeros(1, 1, 32)
    w[0, 0, 6], w[0, 0, 7] = 6.0, -1.0  # codes 7 and 10 of byte 3
    packed, scales, _ = nvfp4.quantize_weight(w, None)
    assert packed[0, 0].tolist() == [0, 0, 0, 0xA7] + [0] * 12
    assert scales.shape == (1, 1, 1) and "byte j:  K = 32j .. 32j + 31" in text


def test_pairs_and_their_nibble():
    text = drawing("Paired 4:8 sparsity, compressed", "a nibble tells")
    listed = re.findall(r"0x([0-9a-f]) \((\d),(\d)\)", text)
    assert {(int(n, 16), int(a) | int(b) << 2) for n, a, b in listed} == {(p, p) for p in PATTERNS}
    cells = re.search(r"^values((?:[ .a-d]+\|){3}[ .a-d]+)", text, re.MULTILINE)[1].split("|")
    kept = [pair for pair, cell in enumerate(cells) if re.search(r"[a-d]", cell)]
    nibble = int(re.search(r"and  0x([0-9a-f])\b", text)[1], 16)
    assert kept == [1, 3] and nibble == kept[0] | kept[1] << 2
    assert "stored    [b|a] [d|c]" in text
    w = torch.zeros(1, 32, 32)
    w[0, :, 2:4], w[0, :, 6:8] = torch.tensor([0.5, 1.0]), torch.tensor([1.5, 6.0])
    a_comp, e_meta, _ = compressed(w)
    a, b, c, d = 1, 2, 3, 7  # the codes
    assert a_comp[0, 0, :2].tolist() == [b << 4 | a, d << 4 | c]
    assert e_meta[0, 0, 0] == PATTERNS[0] << 4 | nibble  # the next group is empty


def compressed(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    packed, scales, _ = nvfp4.quantize_weight(w, None)
    return nvfp4.compress(packed, scales, w.shape[2])


def tiles(text: str) -> tuple[list[int], list[int]]:
    """Sizes along M and K of the drawn weight."""
    k = numbers(re.search(r"^ +K ([\d ]+?)  +rows", text, re.MULTILINE)[1])
    m = re.findall(r"^(?:M)? +(\d+) +\[ \(", text, re.MULTILINE)
    return [int(size) for size in m], [int(size) for size in k]


def test_every_byte_of_a_compressed_weight_is_where_it_is_drawn(generator):
    text = drawing("Paired 4:8 sparsity, compressed", "a_comp")
    rows_of, columns_of = tiles(text)
    assert (rows_of, columns_of) == ([64, 64, 32], [128, 128, 96])
    for line in (
        "a_comp   [warp w = 0 .. rows/16-1] [lane l = 0 .. 31] [step s = 0 .. n-1] [4 bytes]",
        "of rows r = 16 w + l / 4 and r + 8, 8-group j = l % 4 of step s",
        "[ row r, idx0 ] [ row r, idx1 ] [ row r+8, idx0 ] [ row r+8, idx1 ]",
        "e_meta   [warp w] [l / 4 = 0 .. 7] [step s] [4 bytes]",
        "row r + 8       row r:  group 3    group 2     group 1     group 0",
        "sfa      [row 0 .. rows-1] [step s]",
        "tile (b, c) begins at u * (64 b S + rows_b * 4 c)",
    ):
        assert line in text
    m, k = sum(rows_of), sum(columns_of)
    w = nvfp4.prune_paired_4of8(torch.randn(2, m, k, generator=generator))
    packed, scales, _ = nvfp4.quantize_weight(w)
    steps = k // 32
    groups = packed.view(2, m, steps, 4, 4)  # step, 8-group, byte
    nibbles, kept = chosen(groups)
    a_comp, e_meta, sfa = (part.view(2, -1) for part in nvfp4.compress(packed, scales, k))
    row, step, group = torch.meshgrid(*map(torch.arange, (m, steps, 4)), indexing="ij")
    b, c = row // 64, step // 4
    r, s = row % 64, step % 4
    rows_b, n = torch.tensor(rows_of)[b], torch.tensor(columns_of)[c] // 32
    start = 64 * b * steps + rows_b * 4 * c
    warp, within = r // 16, r % 16
    half, lane = within // 8, within % 8 * 4 + group
    place = 8 * start + ((warp * 32 + lane) * n + s) * 4 + 2 * half
    assert torch.equal(a_comp[:, place], kept[..., 0])
    assert torch.equal(a_comp[:, place + 1], kept[..., 1])
    word = 2 * start + ((warp * 8 + within % 8) * n + s) * 4
    bit = 16 * half + 4 * group
    assert torch.equal(e_meta[:, word + bit // 8] >> bit % 8 & 15, nibbles)
    place = (start + r * n + s)[..., 0]
    assert torch.equal(sfa[:, place], scales)


def chosen(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nibbles [...] and kept bytes [..., 2] of [..., 4] bytes: those not 0, then the first ones."""
    order = torch.arange(4) + 4 * (groups == 0)
    two = order.argsort(-1)[..., :2].sort(-1).values
    return (two[..., 0] | two[..., 1] << 2).to(torch.uint8), groups.gather(-1, two)


def test_the_table_of_the_compressed_tensors():
    text = section("Paired 4:8 sparsity, compressed")
    listed = re.findall(r"^\| `(\w+)` \| uint8 \[E, M, K/(\d+)\] \| (\d+):", text, re.MULTILINE)
    parts = dict(zip(("a_comp", "e_meta", "sfa"), compressed(torch.zeros(3, 64, 96))))
    assert [name for name, _, _ in listed] == list(parts)
    for name, divisor, size in listed:
        assert parts[name].shape == (3, 64, 96 // int(divisor))
        assert parts[name].nbytes == 3 * 64 * 96 // 32 * int(size)
    assert "That is 11 bytes for 32 weights" in text
    assert f"(layout version {nvfp4.LAYOUT_VERSION}," in text


def test_gate_and_up_rows():
    text = drawing("Gate and up rows", "gate 0..7")
    held = re.findall(r"(gate|up) (\d+)\.\.(\d+)", text)
    want = [
        (16 if name == "up" else 0) + row
        for name, first, last in held
        for row in range(int(first), int(last) + 1)
    ]
    assert len(want) == 32 and nvfp4.interleave_gate_up_rows(16).tolist() == want


def test_keys_of_the_experts_state_dict():
    text = section("State dict of `SparseNVFP4Experts`").partition("\n\n`codes`")[0]
    named = set(re.findall(r"`((?:gate_up\.|down\.)?\w+)`", text))
    assert named == set(SparseNVFP4Experts(2, 32, 32).state_dict())
