"""fp8_linear on a CPU: E4M3 codes are decoded to BF16, exactly, and multiplied by oneDNN.

A block of weights is decoded, multiplied with all rows and finished before the next begins. torch
gives no FP32 result of a BF16 product, so the product is taken twice: `high` is the sum rounded to
BF16, and `low` the rounded difference of the same sum and `high` (torch.addmm with beta = -1, which
oneDNN adds in FP32 before it rounds). Together they hold 16 bits of the FP32 sum or more. That pays
where a CPU has BF16 matrix units (AMX); elsewhere decoded codes are multiplied in FP32.

Every product has the same shape, config.rows x a block of weights: oneDNN picks another order of
summation for another number of rows, and rows of a batch must not depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...problem import Problem
from ...scratch import keep, take
from .epilogue import finish

PRODUCTS = ("bf16x2", "fp32")
_ROWS = (1, 16, 32, 64, 128, 256)
_TILE = 32  # of K: a matrix unit reads past the end of a shorter row, where NaN times 0 is NaN
_DEPTH = 1 << 14  # of K in one product; sums of longer rows are added up in FP32
_WEIGHTS = 1 << 20  # decoded at a time: 2 MiB of BF16
_ACTIVATIONS = 1 << 24  # decoded at a time, at most
_TOTALS = 1 << 19  # FP32 sums at a time, at most


@dataclass(frozen=True)
class Config:
    """How products are taken, and how many rows each has."""

    product: str
    rows: int

    @property
    def name(self) -> str:
        return f"cpu_{self.product}_{self.rows}"

    @property
    def policy(self) -> str:
        return {"bf16x2": "two BF16 products", "fp32": "FP32 product"}[self.product]


variants = {config.name: config for config in (Config(p, rows) for p in PRODUCTS for rows in _ROWS)}


def config(problem: Problem) -> Config:
    product = "bf16x2" if has_matrix_units() and bf16_products_hold() else "fp32"
    m = problem.spec("input").shape[0]
    few = next((rows for rows in _ROWS if rows >= m), _ROWS[-1])
    legal = [rows for rows in _ROWS if refuses(Config(product, rows), problem) is None]
    return Config(product, max((rows for rows in legal if rows <= few), default=1))


def refuses(config: Config, problem: Problem) -> str | None:
    """Why a configuration is not legal for the problem, or None."""
    if config.product == "bf16x2" and not bf16_products_hold():
        return "BF16 products do not add up in FP32 on this CPU"
    k = problem.spec("input").shape[1]
    if config.rows > 1 and config.rows * k > _ACTIVATIONS:
        return f"{config.rows} decoded rows of {k} take more memory than {_ACTIVATIONS} elements"
    return None


@functools.lru_cache(maxsize=1)
def has_matrix_units() -> bool:
    """Whether BF16 products run at several times the speed of FP32's (Intel AMX)."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


@functools.lru_cache(maxsize=1)
def bf16_products_hold() -> bool:
    """Whether two BF16 products hold the FP32 sum here, for several shapes."""
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 64, 512), (16, 33, 100), (64, 128, 2048)):
        a, b = (
            torch.randn(size, k, generator=generator, dtype=torch.float32, device="cpu")
            .to(torch.float8_e4m3fn)
            .to(torch.bfloat16)
            for size in (m, n)
        )
        total = torch.empty(m, n, dtype=torch.float32, device="cpu")
        part = torch.empty(2, m, n, dtype=torch.bfloat16, device="cpu")
        _multiply_twice(a, b, part, total, False)
        exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        if not ((total - exact).abs() <= 2.0**-16 * exact.abs() + 2.0**-18 * size).all():
            return False
    return True


def _multiply_twice(
    x: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    total: torch.Tensor,
    add: bool,
) -> None:
    """total (+)= x @ weight.T of BF16 operands; `part` is BF16 scratch of two such products."""
    high, low = part
    torch.mm(x, weight.T, out=high)
    torch.addmm(high, x, weight.T, beta=-1, out=low)
    total.add_(high) if add else total.copy_(high)
    total.add_(low)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    part: torch.Tensor,
    total: torch.Tensor,
    add: bool,
) -> None:
    """total (+)= x @ weight.T of FP32 operands; `part` is FP32 scratch of one such product."""
    if add:
        torch.mm(x, weight.T, out=part[0])
        total.add_(part[0])
    else:
        torch.mm(x, weight.T, out=total)


# --- decoding ------------------------------------------------------------------------------------

_PIECE = 1 << 18  # codes decoded at a time: they stay in a core's cache
_SCALE = 2.0**16  # what is lost by reading both operands of a product as FP16


class _Decoder:
    """Codes as 2^-8 of their values, with each row's K in another order, the same for all operands.

    An E4M3 number is an FP16 number of the same mantissa and of an exponent that is 8 smaller,
    subnormal or not. Two codes are read as one int16 and moved to their places in FP16 by shifts:
    columns come out as 0, 2, 4, ..., 1, 3, 5, ...
    """

    def __init__(self, spare: torch.Tensor) -> None:
        """`spare` holds six bytes for each code of a piece, and of one row at least."""
        self.wide = spare[: spare.numel() // 3 * 2]
        self.halves = spare[self.wide.numel() :].view(torch.int16)
        # as tensors: of a number torch makes a new one for each operation
        # 0xbf80: the sign, four bits of exponent, three of mantissa
        numbers = (1, 8, -0x4080)
        self.one, self.eight, self.mask = (
            torch.tensor(number, dtype=torch.int16, device="cpu") for number in numbers
        )

    def decode(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, BF16 or FP32 [rows, K or more]; zeros follow K."""
        width = _rounded_up(codes.shape[1], 4)
        for some in _spans(codes.shape[0], max(1, self.wide.numel() // width)):
            words = _as_words(codes[some], width)
            shape = (some.stop - some.start, width)
            halves = self.halves[: shape[0] * width].view(shape)
            wide = self.wide[: shape[0] * width].view(shape)
            pairs = words.view(torch.int16)
            first, second = halves[:, : width // 2], halves[:, width // 2 :]
            torch.bitwise_left_shift(pairs, self.eight, out=first)
            first.bitwise_right_shift_(self.one)  # the sign fills two bits
            torch.bitwise_right_shift(pairs, self.one, out=second)
            halves.bitwise_and_(self.mask)
            wide.copy_(halves.view(torch.float16))
            if _holds_nan(words, halves.view(torch.int32)):  # read like any other code
                wide.masked_fill_(wide.abs() == 1.875, torch.nan)
            out[some, :width] = wide
            out[some, width:] = 0


def _holds_nan(words: torch.Tensor, spare: torch.Tensor) -> bool:
    """Whether one of the four codes of some int32 is 0x7f or 0xff."""
    spare = spare[:, : words.shape[1]]
    torch.bitwise_and(words, 0x7F7F7F7F, out=spare)
    spare.add_(0x01010101).bitwise_and_(-0x7F7F7F80)
    return bool(spare.amax() != 0) or bool(spare.amin() != 0)


def _as_words(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes [rows, K] as int32 [rows, width / 4], copied where they cannot be read so."""
    rows, k = codes.shape
    start, pitch = codes.storage_offset(), codes.stride(0)
    if k == width and codes.stride(1) == 1 and start % 4 == pitch % 4 == 0:
        return codes.view(torch.int32)
    copy = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    copy[:, :k] = codes.view(torch.uint8)
    return copy.view(torch.int32)


# --- the product ---------------------------------------------------------------------------------


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _spans(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _block(config: Config, m: int, n: int, k: int) -> tuple[int, int]:
    """Rows whose activations are decoded at a time, and columns (weights)."""
    whole = _rounded_up(m, config.rows)
    most = min(_ACTIVATIONS // max(k, 1), 2048) // config.rows * config.rows
    rows = max(config.rows, min(whole, most))
    columns = min(_WEIGHTS // max(min(k, _DEPTH), 1), _TOTALS // rows) // 64 * 64
    return rows, min(max(columns, 64), n)


class _Buffers:
    """Scratch of one call: decoded operands, products and FP32 sums, in one piece of memory."""

    def __init__(self, config: Config, rows: int, columns: int, k: int) -> None:
        dtype = torch.bfloat16 if config.product == "bf16x2" else torch.float32
        self.steps = list(_spans(k, _DEPTH))
        self.widths = [_rounded_up(step.stop - step.start, _TILE) for step in self.steps]
        deepest = max(self.widths, default=0)
        each = 4 // dtype.itemsize  # of `dtype` in one float of memory
        wanted = {
            "total": rows * columns,
            "part": 2 * config.rows * columns // each + 1,
            "spare": 3 * (max(_PIECE, deepest) // 2),
            "weights": columns * deepest // each,
            "x": rows * sum(self.widths) // each,
        }
        self.memory = take(sum(wanted.values()))
        parts = self.memory[: sum(wanted.values())].split(list(wanted.values()))  # type: ignore[no-untyped-call]
        total, part, spare, weights, x = parts
        self.total: torch.Tensor = total
        self.part, self.weights = part.view(dtype), weights.view(dtype)
        lengths = [rows * width for width in self.widths]
        self.x = [
            piece.view(rows, width)
            for piece, width in zip(x.view(dtype).split(lengths), self.widths)
        ]
        self.decoder = _Decoder(spare)

    def take_rows(self, x: torch.Tensor) -> None:
        """Decode rows of activations, with the factor of both operands; zeros follow them."""
        for step, decoded in zip(self.steps, self.x):
            self.decoder.decode(x[:, step], decoded[: x.shape[0]])
            decoded[: x.shape[0]].mul_(_SCALE)
            decoded[x.shape[0] :] = 0

    def sums(self, config: Config, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """FP32 sums of the rows taken, rounded up to whole products, with a block of weights."""
        columns = weight.shape[0]
        total = self.total[: rows * columns].view(rows, columns)
        if not self.steps:
            return total.zero_()
        part = self.part[: 2 * config.rows * columns].view(2, config.rows, columns)
        multiply = _multiply_twice if config.product == "bf16x2" else _multiply
        for i, (step, width, x) in enumerate(zip(self.steps, self.widths, self.x)):
            decoded = self.weights[: columns * width].view(columns, width)
            self.decoder.decode(weight[:, step], decoded)
            for some in _spans(rows, config.rows):
                multiply(x[some], decoded, part, total[some], i > 0)
        return total


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: float | torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    epilogue: str,
    fast_accum: bool,
) -> None:
    (m, n), k = out.shape, x.shape[1]
    rows, columns = _block(config, m, n, k)
    buffers = _Buffers(config, rows, columns, k)
    for down in _spans(m, rows):
        count = down.stop - down.start
        buffers.take_rows(x[down])
        for across in _spans(n, columns):
            whole = _rounded_up(count, config.rows)
            total = buffers.sums(config, weight[across], whole)[:count]
            addend = None if bias is None else bias[across]
            more = None if residual is None else residual[down, across]
            out[down, across] = finish(total, alpha, addend, more, epilogue)
    keep(buffers.memory)
