"""What the ways to accumulate FP8 products cost in accuracy, against float64.

    python benchmarks/fp8_accumulation.py --output benchmarks/results/cpu_x86_64_avx512_vnni
    python benchmarks/fp8_accumulation.py --device cuda --output benchmarks/results/h200

Writes fp8_accumulation.json, from which docs/generate.py makes tables of docs/numerics.md. On a CPU
it has a model of Hopper's FP8 tensor cores (`tensor_core`) and farro's own CPU results; on a GPU
what the kernels there give, and torch._scaled_mm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import farro
from farro.bench.results import commit, empty
from farro.formats.fp8 import BLOCK, quantize, spread

BITS = 14  # significant bits of a sum that Hopper's FP8 tensor cores keep
STEP = 32  # of K, what one instruction adds
PROMOTIONS = (128, 256, 512, None)  # of K between promotions to FP32; None: never
DEPTHS = (512, 4096, 16384)
SIZE = 64  # rows and columns
SEEDS = 3
Row = dict[str, Any]


# --- data ----------------------------------------------------------------------------------------


def normal(k: int, size: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn(size, k, generator=random) for _ in range(2))
    return x, weight * k**-0.5


def outliers(k: int, size: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One channel of a hundred is 100 times as large, as in activations of language models."""
    x, weight = normal(k, size, random)
    x[:, torch.randperm(k, generator=random)[: max(1, k // 100)]] *= 100
    return x, weight


def same_sign(k: int, size: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing cancels, so what is cut off adds up."""
    x, weight = normal(k, size, random)
    return x.abs(), weight.abs()


DATA = {"normal": normal, "outliers": outliers, "same sign": same_sign}


# --- ways to add up ------------------------------------------------------------------------------


def tensor_core(
    x: torch.Tensor, weight: torch.Tensor, promote: int | None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """A model of Hopper's sums of codes x [M,K] and weight [N,K] (float64), FP32 [M,N].

    For each 32 of K the exact products and the sum so far are cut off (toward zero) below the 14th
    bit of the largest of them and added; the sum keeps 14 bits. Every `promote` of K it is added
    to a total in FP32, times `scale` [M, N, K / promote] where there is one, and begins anew.
    """
    (m, k), n = x.shape, weight.shape[0]
    total = torch.zeros(m, n)
    acc = torch.zeros(m, n, dtype=torch.float64)
    for start in range(0, k, STEP):
        part = slice(start, start + STEP)
        products = x[:, None, part] * weight[None, :, part]
        largest = torch.maximum(products.abs().amax(-1), acc.abs())
        unit = _unit(largest)
        acc = _cut(acc, unit) + _cut(products, unit.unsqueeze(-1)).sum(-1)
        acc = _cut(acc, _unit(acc.abs()))
        if promote is not None and (start + STEP) % promote == 0:
            s = 1.0 if scale is None else scale[:, :, start // promote].double()
            total = (total.double() + acc * s).float()
            acc.zero_()
    return (total.double() + acc).float()


def _unit(largest: torch.Tensor) -> torch.Tensor:
    """The worth of the last of 14 bits of a number."""
    exponent = torch.frexp(largest).exponent - 1
    return torch.exp2((exponent - (BITS - 1)).double())


def _cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


def single(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """FP32 sums in steps of 32, each step's exact."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], STEP):
        part = slice(start, start + STEP)
        s = 1.0 if scale is None else scale[:, :, start // BLOCK].double()
        total = (total.double() + x[:, part] @ weight[:, part].T * s).float()
    return total


# --- the measurement -----------------------------------------------------------------------------


def relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


class Problem:
    """Data quantized one way, with the exact product of the codes and of the data."""

    def __init__(self, data: str, k: int, scales: str, seed: int, device: str = "cpu") -> None:
        random = torch.Generator().manual_seed(1000003 * seed + k)
        x, weight = DATA[data](k, SIZE, random)
        kinds = ("1x128", "128x128") if scales == "block" else ("per_tensor", "per_tensor")
        (self.x, self.x_scale), (self.w, self.w_scale) = (
            tuple(t.to(device) for t in quantize(tensor, kind))
            for tensor, kind in zip((x, weight), kinds)
        )
        self.scales = scales
        restored = [
            codes.double() * spread(scale.double(), codes.shape, kind)
            for codes, scale, kind in (
                (self.x, self.x_scale, kinds[0]),
                (self.w, self.w_scale, kinds[1]),
            )
        ]
        self.exact = restored[0] @ restored[1].T
        self.unquantized = x.double().to(device) @ weight.double().to(device).T

    def factor(self) -> torch.Tensor:
        """Of sums of codes, with one scale."""
        return self.x_scale.double() * self.w_scale.double()

    def modelled(self) -> Iterator[tuple[str, torch.Tensor]]:
        x, w = self.x.double(), self.w.double()
        if self.scales == "block":  # [M, N, K / 128]; one block of columns holds all of N
            both = self.x_scale[:, None, :] * self.w_scale[0][None, None, :]
            scale = both.expand(-1, w.shape[0], -1)
            yield "FP32", single(x, w, scale)
            yield "14 bits, promoted every 128", tensor_core(x, w, BLOCK, scale)
            return
        factor = self.factor()
        yield "FP32", single(x, w, None).double() * factor
        for promote in PROMOTIONS:
            name = "14 bits, never promoted"
            if promote is not None:
                name = f"14 bits, promoted every {promote}"
            yield name, tensor_core(x, w, promote).double() * factor

    def measured(self, backends: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """What kernels give, in BF16."""
        for backend in backends:
            if self.scales == "block":
                operands = (self.x, self.w, self.x_scale, self.w_scale)
                product = farro.fp8_blockwise_linear_bf16(*operands, backend=backend)
                yield f"farro {backend}", product
                continue
            for fast in (False, True):
                alpha = self.x_scale * self.w_scale
                options: dict[str, Any] = {"fast_accum": fast, "backend": backend}
                product = farro.fp8_linear_bf16(self.x, self.w, alpha, **options)
                yield f"farro {backend}{', fast_accum' if fast else ''}", product
        if self.x.is_cuda and self.scales == "tensor":
            for fast in (False, True):
                product = torch._scaled_mm(
                    *(self.x, self.w.T),
                    scale_a=self.x_scale,
                    scale_b=self.w_scale,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )
                yield f"torch._scaled_mm{', fast' if fast else ''}", product


def rows(device: str, depths: tuple[int, ...] = DEPTHS, seeds: int = SEEDS) -> list[Row]:
    """The largest errors over seeds, one row for each data, depth, kind of scales and way."""
    found: dict[tuple[Any, ...], Row] = {}
    for data in DATA:
        for k in depths:
            for scales in ("tensor", "block"):
                for seed in range(seeds):
                    problem = Problem(data, k, scales, seed, device)
                    for row in _of(problem, device):
                        key = (data, k, scales, row["way"])
                        about = {"data": data, "k": k, "scales": scales, **row}
                        old = found.setdefault(key, about)
                        for name in ("error", "bf16_error"):
                            worst = max(filter(None, (old.get(name), row.get(name))), default=None)
                            old[name] = worst
    return list(found.values())


def _of(problem: Problem, device: str) -> Iterator[Row]:
    exact = problem.exact
    yield {
        "way": "exact, rounded to BF16",
        "source": "formula",
        "error": None,
        "bf16_error": relative(exact.bfloat16(), exact),
        "quantization_error": relative(exact, problem.unquantized),
    }
    if device == "cpu":
        for way, result in problem.modelled():
            errors = relative(result, exact), relative(result.bfloat16(), exact)
            yield {"way": way, "source": "model", "error": errors[0], "bf16_error": errors[1]}
    for way, result in problem.measured(("cpu",) if device == "cpu" else ("cuda", "triton")):
        error = relative(result, exact)
        yield {"way": way, "source": "measured", "error": None, "bf16_error": error}


def main(arguments: list[str], make: Callable[[str], list[Row]] = rows) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for what its kernels give")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    given = parser.parse_args(arguments)
    about = empty("", torch.device(given.device), ["fp8_accumulation.py", *arguments])
    kept = ("schema", "date", "command", "machine", "versions")
    result = {**{name: about[name] for name in kept}, "commit": commit()}
    path: Path = given.output / "fp8_accumulation.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in make(given.device))
    text = json.dumps(result, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n')
    return path


if __name__ == "__main__":
    print(f"wrote {main(sys.argv[1:])}")
