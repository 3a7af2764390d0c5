"""Samples of grouped products, of values whose sums are exact in any order."""

from __future__ import annotations

from typing import Any

import torch

from farro import nvfp4
from farro.problem import Problem
from farro.testing.nvfp4_group_mm import (
    UNTOUCHED,
    activations_of,
    group_mm,
    group_mm_ragged,
    spoil,
    weight_of,
)

from .sample import Argument, Sample

_BYTES = Argument((torch.uint8,), layouts=("contiguous", "offset"))
_ROWS = Argument((torch.uint8,), rows=0, layouts=("contiguous", "offset"))
_FLOATS = Argument((torch.float32,), layouts=("contiguous", "offset"))
_COUNTS = Argument((torch.int32,), layouts=("contiguous", "offset"))


def _operands(
    generator: torch.Generator, experts: int, n: int, k: int, coded: bool, rows: tuple[int, ...]
) -> dict[str, Any]:
    return {
        **weight_of(experts, n, k, generator, "exact"),
        **activations_of(rows, k, generator, "exact", coded),
        "alphas": torch.exp2(torch.randint(-2, 2, (experts,), generator=generator).float()),
        "features": n,
        "k": k,
    }


def _padded(
    generator: torch.Generator,
    m: int = 17,
    n: int = 96,
    k: int = 160,
    experts: int = 3,
    coded: bool = True,
    full: bool = False,
    exact: bool = True,
) -> dict[str, Any]:
    """m rows of each expert, some of them tokens; the others hold NaN."""
    given = _operands(generator, experts, n, k, coded, (experts, m))
    counts = torch.randint(0, m + 2, (experts,), generator=generator).int()
    given["expert_num_tokens"] = torch.full_like(counts, m) if full else counts
    spoil(given, given["expert_num_tokens"], False)
    return given


def _ragged(
    generator: torch.Generator,
    m: int = 17,
    n: int = 96,
    k: int = 160,
    experts: int = 3,
    coded: bool = True,
    exact: bool = True,
) -> dict[str, Any]:
    """m rows of all experts together, but for the last one or two."""
    given = _operands(generator, experts, n, k, coded, (m,))
    inner = torch.randint(0, m + 1, (experts - 1,), generator=generator).sort().values
    ends = torch.tensor([0, max(m - 1, 0)])
    offsets = torch.cat((ends[:1], inner.clamp_max(max(m - 1, 0)), ends[1:])).int()
    given["expert_offsets"] = offsets
    spoil(given, offsets, True)
    return given


def _empty(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Zeros where there is no K, in rows that have a token."""
    shape = (*inputs["b_act"].shape[:-1], inputs["features"])
    out = torch.full(shape, UNTOUCHED, dtype=torch.bfloat16)
    offsets = inputs.get("expert_offsets")
    if offsets is not None:
        out[int(offsets[0]) : int(offsets[-1])] = 0
    else:
        for place, count in zip(out, inputs["expert_num_tokens"].tolist()):
            place[:count] = 0
    return (out,)


def _required(backend: str, problem: Problem) -> bool:
    if backend != "cuda":
        return True
    copied = ("a_comp", "e_meta", "sfa", "b_act")  # by bulk copies, which need whole 16 bytes
    return all(problem.spec(name).align == 16 for name in copied)


_EMPTIES = {
    "no rows": {"m": 0},
    "no features": {"n": 0},
    "no sum": {"k": 0},
    "no sum, W4A16": {"k": 0, "coded": False},
    "nothing": {"m": 0, "n": 0, "k": 0},
}
_WRONG = {
    "features of another weight": ({"features": 64}, ValueError, ("features", "64", "M = 96")),
    "features 96.0": ({"features": 96.0}, TypeError, ("features", "float")),
    "k of another weight": ({"k": 128}, ValueError, ("k is 128", "K = 160")),
    "k True": ({"k": True}, TypeError, ("k must be an int", "bool")),
    "config_id 99": ({"config_id": 99}, ValueError, ("config_id", "99", "group_mm_configs")),
    "config_id -1": ({"config_id": -1}, ValueError, ("config_id", "-1")),
    "config_id None": ({"config_id": None}, TypeError, ("config_id", "NoneType")),
    "BF16 with scales": (
        {"b_act": torch.zeros(4, 17, 160, dtype=torch.bfloat16)},
        TypeError,
        ("b_act", "bfloat16", "uint8", "sfb=None"),
    ),
}


def _warm_shape(inputs: dict[str, Any]) -> tuple[int, int, int]:
    return inputs["b_act"].shape[-2], inputs["features"], inputs["k"]


def _out(inputs: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    return (*inputs["b_act"].shape[:-1], inputs["features"]), torch.bfloat16


_WEIGHT = dict.fromkeys(("a_comp", "e_meta", "sfa"), _BYTES)

GROUP_MM = Sample(
    name="group_mm",
    operator="nvfp4_group_mm",
    function=group_mm,
    make=_padded,
    arguments={
        **_WEIGHT,
        **dict.fromkeys(("b_act", "sfb"), _BYTES),
        "alphas": _FLOATS,
        "expert_num_tokens": _COUNTS,
    },
    variants={
        "W4A4": {"experts": 4},
        "full": {"full": True, "k": 128, "n": 64},
        "W4A16": {"coded": False},
        "one": {"m": 1, "n": 32, "k": 32, "experts": 1, "full": True},
    },
    empties=_EMPTIES,
    empty_result=_empty,
    out=_out,
    out_layouts=("contiguous", "offset"),
    out_fill=UNTOUCHED,
    wrong={
        **_WRONG,
        "ragged activations": (
            {"b_act": torch.zeros(17, 80, dtype=torch.uint8)},
            ValueError,
            ("b_act", "[17, 80]", "[E, max_n, K/2]"),
        ),
        "cluster_m 1.0": ({"cluster_m": 1.0}, TypeError, ("cluster_m", "float")),
    },
    required=_required,
    records_grad=False,
    warm_shape=_warm_shape,
)

GROUP_MM_RAGGED = Sample(
    name="group_mm_ragged",
    operator="nvfp4_group_mm",
    function=group_mm_ragged,
    make=_ragged,
    arguments={
        **_WEIGHT,
        **dict.fromkeys(("b_act", "sfb"), _ROWS),
        "alphas": _FLOATS,
        "expert_offsets": _COUNTS,
    },
    variants={
        "W4A4": {"experts": 4},
        "W4A16": {"coded": False, "k": 128, "n": 64},
        "one": {"m": 1, "n": 32, "k": 32, "experts": 1},
    },
    empties=_EMPTIES,
    empty_result=_empty,
    out=_out,
    out_layouts=("contiguous", "offset"),
    out_fill=UNTOUCHED,
    wrong={
        **_WRONG,
        "counts": (
            {"expert_offsets": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            ("expert_offsets", "[2]", "[5]", "[E + 1]"),
        ),
    },
    required=_required,
    records_grad=False,
    warm_shape=_warm_shape,
)


def _fused(
    generator: torch.Generator, m: int = 17, n: int = 64, how: Any = (), **options: Any
) -> dict[str, Any]:
    """Full experts, since codes of unused rows are unspecified; n gate rows and as many up rows."""
    given = _padded(generator, m, 2 * n, full=True, **options)
    gscale = torch.exp2(torch.rand(1, generator=generator) * 6)
    return {**given, "gscale": gscale, **dict(how)}


GROUP_MM_SWIGLU_QUANT = Sample(
    name="group_mm_swiglu_quant",
    operator="nvfp4_group_mm_swiglu_quant",
    function=nvfp4.group_mm_swiglu_quant,
    make=_fused,
    arguments={
        **_WEIGHT,
        **dict.fromkeys(("b_act", "sfb"), _BYTES),
        **dict.fromkeys(("alphas", "gscale"), _FLOATS),
        "expert_num_tokens": _COUNTS,
    },
    variants={
        "W4A4": {"experts": 4},
        "interleaved W4A16": {"coded": False, "how": {"interleaved": True}},
        "situ": {"k": 128, "how": {"activation": "situ", "beta": 2.0, "linear_beta": 7.0}},
        "one": {"m": 1, "n": 32, "k": 32, "experts": 1},
    },
    empties={name: options for name, options in _EMPTIES.items() if "sum" not in name},
    empty_result=lambda inputs: tuple(
        torch.empty(*inputs["b_act"].shape[:2], inputs["features"] // of, dtype=torch.uint8)
        for of in (4, 64)
    ),
    wrong={
        **{name: wrong for name, wrong in _WRONG.items() if "another" not in name},
        "features of another weight": (
            {"features": 64},
            ValueError,
            ("features", "64", "M = 128"),
        ),
        "activation relu": ({"activation": "relu"}, ValueError, ("activation", "'relu'", "'silu'")),
        "interleaved 1": ({"interleaved": 1}, TypeError, ("interleaved", "int", "bool")),
        "beta 0": ({"beta": 0.0}, ValueError, ("beta", "0.0", "positive")),
    },
    required=_required,
    records_grad=False,
    graphs=4,  # with dynamic=True a float among the arguments has torch begin the first one anew
    warm_shape=_warm_shape,
)

SAMPLES = (GROUP_MM, GROUP_MM_RAGGED, GROUP_MM_SWIGLU_QUANT)
