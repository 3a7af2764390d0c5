"""farro bench: one harness for all operators, one small adapter file for each.

An adapter (`int8_gemm.py`, ...) builds a `Case` from sizes: the public call, the peers, the truth.
Everything else is shared: timing (timing.py), floors (floor.py), the run (runner.py), results on
disk and their comparison (results.py), the table (table.py) and the plots (plots.py).
"""

from __future__ import annotations

import importlib

from .case import Adapter

OPERATORS = (
    "int8_gemm",
    "int8_linear",
    "int8_quantize",
    "fp8_quantize",
    "fp8_linear",
    "fp8_blockwise_linear",
    "fp8_swiglu_quantize",
    "moe_route",
    "moe_finalize",
    "moe_ffn",
    "nvfp4_quantize",
    "nvfp4_scatter",
    "nvfp4_group_mm",
    "nvfp4_moe",
)


def adapter(operator: str) -> Adapter:
    """The adapter of an operator of OPERATORS, else ValueError."""
    if operator not in OPERATORS:
        known = ", ".join(OPERATORS)
        raise ValueError(f"no benchmark of {operator!r}; there are: {known}")
    found: Adapter = importlib.import_module(f".{operator}", __name__).ADAPTER
    return found
