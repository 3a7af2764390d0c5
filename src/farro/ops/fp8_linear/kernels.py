"""The kernels of fp8_linear in order of preference, each with the tiles that can be pinned."""

from __future__ import annotations

from ...dispatch import Kernel, Operator
from . import cpu, sm90, triton
from .checks import FUNCTIONS
from .variants import Pinning, Tiles

PINNING = Pinning(
    (
        Tiles(
            Kernel(
                "fp8_linear.cuda_sm90",
                "cuda",
                run="ops.fp8_linear.sm90:run",
                bind="ops.fp8_linear.sm90:bind",
                needs=frozenset({"wgmma"}),
                why_not=sm90.why_not,
                config=sm90.config,
                must_run=sm90.must_run,
                configs=sm90.candidates,
                yields=sm90.yields,
            ),
            sm90.VARIANTS,
            sm90.refuses,
        ),
        Tiles(
            Kernel(
                "fp8_linear.cpu",
                "cpu",
                run="ops.fp8_linear.cpu:run",
                needs=frozenset({"cpu"}),
                config=cpu.config,
                must_run=lambda problem: True,
            ),
            cpu.variants,
            cpu.refuses,
        ),
        Tiles(
            Kernel(
                "fp8_linear.triton",
                "triton",
                run="ops.fp8_linear.triton:run",
                bind="ops.fp8_linear.triton:bind",
                needs=frozenset({"triton"}),
                why_not=triton.why_not,
                config=triton.config,
                must_run=triton.must_run,
                configs=triton.candidates,
            ),
            triton.variants,
            triton.refuses,
        ),
        Tiles(
            Kernel(
                "fp8_linear.reference",
                "reference",
                run="ops.fp8_linear.reference:run",
                must_run=lambda problem: True,
            ),
            {"reference": None},
        ),
    )
)
KERNELS = PINNING.kernels
OPERATOR = Operator(
    "fp8_linear", KERNELS, functions=(*FUNCTIONS.values(), "select_fp8_linear_tile")
)
