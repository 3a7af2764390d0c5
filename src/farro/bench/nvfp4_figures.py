"""What the operators of paired-4:8 sparse NVFP4 layers have to reach on an H200."""

from __future__ import annotations

from .figures import Figure, Goal, Point, Value, Where, against, over, over_floor, when

TWO_CALLS = "farro auto, two calls"
_COMPRESSED = 0.344  # bytes of a dense weight
_FP8 = ("DeepGEMM FP8", "Humming FP8", "torch _scaled_grouped_mm FP8")
_MXFP4 = "Humming MXFP4 W4A8"
_SMALL = ((768, 2048), (2048, 768), (1536, 2048), (2048, 1536))
_LARGE = ((32, 4096, 7168), (8, 28672, 4096))
_OVERHEAD = 8.0  # us that a layer may take beside its bytes


def _shape(point: Point) -> tuple[int, int, int]:
    return point["e"], point["n"], point["k"]


def _decode(point: Point) -> bool:
    e, n, k = _shape(point)
    large = e * n * k * _COMPRESSED > 150e6
    return point["variant"] == "w4a4" and point["m"] <= 16 and large


def _small(point: Point) -> bool:
    e, n, k = _shape(point)
    return (point["variant"], point["m"], e) == ("w4a4", 8, 128) and (n, k) in _SMALL


def _large(*rows: int) -> Where:
    return lambda p: p["variant"] == "w4a4" and p["m"] in rows and _shape(p) in _LARGE


def _fused(point: Point) -> float | None:
    plain = point.of("w4a4") if point["variant"] == "fused" else None
    return None if plain is None else over(point.ours, plain.ours)


GROUP_MM = (
    Figure(
        "decode, weights above 150 MB, time over the read floor",
        when(_decode, over_floor),
        *(Goal(worst=1.4), Goal(worst=1.2)),
        less=True,
    ),
    Figure(
        "decode, weights above 150 MB, against the best FP8 peer",
        when(_decode, against(*_FP8)),
        *(Goal(worst=1.9), Goal(worst=2.3)),
    ),
    Figure(
        "decode, weights above 150 MB, against Humming's MXFP4 W4A8",
        when(_decode, against(_MXFP4)),
        *(Goal(worst=1.15), Goal(worst=1.35)),
    ),
    Figure(
        "128 small experts, 8 rows each, time over the read floor",
        when(_small, over_floor),
        *(Goal(worst=1.6), Goal(worst=1.3)),
        less=True,
    ),
    Figure(
        "64 rows of 32 experts, 4096 x 7168, against Humming's MXFP4 W4A8",
        when(lambda p: _large(64)(p) and p["e"] == 32, against(_MXFP4)),
        *(Goal(worst=1.15), Goal(worst=1.4)),
    ),
    Figure(
        "512 and 2048 rows, dense-equivalent",
        when(_large(512, 2048), lambda point: point.tops),
        *(Goal(worst=1150), Goal(worst=1300)),
        unit="TFLOPS",
    ),
    Figure(
        "512 and 2048 rows, against DeepGEMM's FP8",
        when(_large(512, 2048), against("DeepGEMM FP8")),
        aim=Goal(worst=1.0),
    ),
    Figure(
        "fused with SwiGLU and quantizer, time over group_mm alone",
        _fused,
        *(Goal(worst=1.08), Goal(worst=1.03)),
        less=True,
    ),
)


def _two_calls(point: Point) -> float | None:
    plain = point.of("gate_up") if point["variant"] == "fused" else None
    if plain is None or plain.ours is None or plain.ours >= 25:
        return None
    return over(point.us(TWO_CALLS), point.ours)


def _layer(point: Point) -> float | None:
    if point["variant"] != "layer" or not 16 <= point["m"] <= 128 or point.floor is None:
        return None
    return over(point.floor + _OVERHEAD, point.graph)


MOE = (
    Figure(
        "fused form, where the product takes under 25 us, against two launches",
        _two_calls,
        aim=Goal(worst=1.15),
    ),
    Figure(
        "whole layer, T = 16 to 128, the floor + 8 us over the time of a graph",
        _layer,
        *(Goal(worst=0.45), Goal(worst=0.6)),
    ),
)


def around(tokens: Value) -> tuple[Figure, ...]:
    """Of what is around the products; `tokens` of a point, as its operator counts them."""

    def many(point: Point) -> bool:
        return (tokens(point) or 0) >= 512

    return (
        Figure(
            "T >= 512, time over the byte floor",
            when(many, over_floor),
            *(Goal(worst=1.5), Goal(worst=1.3)),
            less=True,
        ),
        Figure(
            "T = 1",
            when(lambda point: tokens(point) == 1, lambda point: point.ours),
            *(Goal(worst=8.0), Goal(worst=6.0)),
            less=True,
            unit="us",
        ),
    )


def _quantized(point: Point) -> float:
    """quant_rows takes M rows, the others M of each of N experts."""
    return float(point["m"] * (1 if point["variant"] == "quant_rows" else point["n"]))


QUANTIZE = around(_quantized)
TOKENS = around(lambda point: float(point["m"]))
PLAN = (
    Figure(
        "T = 8192, 8 routes a token",
        when(lambda point: (point["m"], point["k"]) == (8192, 8), lambda point: point.ours),
        *(Goal(worst=15.0), Goal(worst=8.0)),
        less=True,
        unit="us",
    ),
)
