"""What moe_ffn has to reach on an H200."""

from __future__ import annotations

from .figures import Figure, Goal, Point, Value, over, when
from .moe_ffn_products import DOWN

_OVERHEAD = 6.0  # us that a call may take beside its bytes
_COMPOSED = "farro auto, operators apart"
_LARGE = ((2048, 7168), (14336, 4096))  # DeepSeek-V3 and Mixtral: I, H


def _few(point: Point) -> bool:
    return bool(16 <= point["m"] <= 128)


def _share(point: Point) -> float | None:
    """Of the speed of the active experts' bytes and the overhead."""
    return None if point.floor is None else over(point.floor + _OVERHEAD, point.graph)


def _int8_peers(point: Point) -> float | None:
    """The fastest INT8 layer of another library, over ours."""
    layers = point.fastest("Humming INT8", ending=" layer"), point.fastest("plain Triton fused")
    return over(min((us for us in layers if us is not None), default=None), point.ours)


def _peers(point: Point) -> float | None:
    layers, composed = point.fastest("", ending=" layer"), point.us(_COMPOSED)
    others = over(layers, point.ours), over(composed, point.ours), _int8_peers(point)
    return min((ratio for ratio in others if ratio is not None), default=None)


def _many(group_size: int, value: Value) -> Value:
    def where(point: Point) -> bool:
        shape = point["n"], point["k"]
        return (point["m"], point["group_size"]) == (8192, group_size) and shape in _LARGE

    return when(where, value)


def _small_down(point: Point) -> float | None:
    """A third of a layer's weights are those of the second product."""
    ours = point.fastest("farro cuda, ", "farro triton, ", ending=DOWN)
    return None if point.floor is None else over(ours, point.floor / 3)


LAYER = (
    Figure(
        "T = 16 to 128, the floor + 6 us over the time of a graph",
        when(_few, _share),
        *(Goal(worst=0.5), Goal(worst=0.65)),
    ),
    Figure(
        "T = 16 to 128, against the fastest peer",
        when(_few, _peers),
        *(Goal(worst=1.0), Goal(worst=1.0)),
    ),
    Figure(
        "T = 1, the floor + 6 us over the time of a graph",
        when(lambda point: point["m"] == 1, _share),
        *(Goal(worst=0.35), Goal(worst=0.5)),
    ),
    Figure(
        "T = 8192, DeepSeek-V3 and Mixtral, G256",
        _many(256, lambda point: point.tops),
        *(Goal(worst=800), Goal(worst=1000)),
        unit="TOPS",
    ),
    Figure(
        "T = 8192, DeepSeek-V3 and Mixtral, G128",
        _many(128, lambda point: point.tops),
        aim=Goal(worst=850),
        unit="TOPS",
    ),
    Figure(
        "T = 8192, DeepSeek-V3 and Mixtral, G256, against the best INT8 peer",
        _many(256, _int8_peers),
        *(Goal(worst=1.3), Goal(worst=1.5)),
    ),
    Figure(
        "second product of 128 small experts, 8 rows each, time over its bytes' floor",
        when(lambda p: (p["m"], p["n"], p["k"], p["e"]) == (128, 768, 2048, 128), _small_down),
        *(Goal(worst=1.8), Goal(worst=1.4)),
        less=True,
    ),
)
