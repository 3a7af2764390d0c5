"""What the INT8 operators have to reach on an H200."""

from __future__ import annotations

from .figures import Figure, Goal, Point, Value, Where, against, over, over_floor, when

_GROUP_PEERS = ("Humming", "plain Triton")  # with scales of groups
_PEERS = (*_GROUP_PEERS, "cuBLAS INT8")


def _at(group_size: int, *sizes: tuple[int, int, int]) -> Where:
    def where(point: Point) -> bool:
        return point["group_size"] == group_size and tuple(map(point.about.get, "mnk")) in sizes

    return where


def _few(point: Point) -> bool:
    return bool(point["m"] <= 64 and point["group_size"] >= 64)


def _speed(group_size: int, size: tuple[int, int, int], needed: int, aim: int) -> Figure:
    name = f"G{group_size} at {' x '.join(map(str, size))}"
    value = when(_at(group_size, size), lambda point: point.tops)
    return Figure(name, value, Goal(worst=needed), Goal(worst=aim), unit="TOPS")


_SQUARE = (8192, 4096, 4096)


def _triton_speed(group_size: int, needed: int, aim: int) -> Figure:
    value = when(_at(group_size, _SQUARE), lambda point: point.measure("farro triton", "tops"))
    goals = Goal(worst=needed), Goal(worst=aim)
    return Figure(f"Triton, G{group_size} at 8192 x 4096 x 4096", value, *goals, unit="TOPS")


_DECODED = ((7168, 16384), (24576, 1536))


def _triton_floor() -> Value:
    sizes = ((m, *shape) for m in (1, 16, 64) for shape in _DECODED)
    return when(_at(256, *sizes), lambda point: over(point.floor, point.us("farro triton")))


GEMM = (
    _speed(256, _SQUARE, 1050, 1250),
    _speed(256, (8192, 7168, 16384), 1150, 1250),
    _speed(256, (4096, 24576, 1536), 950, 1100),
    _speed(128, _SQUARE, 850, 1000),
    _speed(64, _SQUARE, 540, 620),
    _speed(32, _SQUARE, 300, 340),
    Figure(
        "G256, M >= 1024, against Humming G256, tuned where it was tuned",
        when(
            lambda point: point["group_size"] == 256 and point["m"] >= 1024,
            against("Humming INT8 G256"),
        ),
        *(Goal(worst=1.4), Goal(worst=1.6)),
    ),
    Figure(
        "M <= 64, G64 to G256, time over the read floor",
        when(_few, over_floor),
        *(Goal(worst=1.2), Goal(worst=1.12)),
        less=True,
    ),
    Figure(
        "M <= 64, G64 to G256, against the fastest INT8 peer",
        when(_few, against(*_PEERS)),
        *(Goal(worst=1.0), Goal(worst=1.0)),
    ),
    Figure(
        "M = 64, G32, time over the read floor",
        when(lambda point: (point["m"], point["group_size"]) == (64, 32), over_floor),
        *(Goal(worst=1.5), Goal(worst=1.35)),
        less=True,
    ),
    Figure(
        "M = 256, against the best INT8 peer with scales of groups",
        when(lambda point: point["m"] == 256, against(*_GROUP_PEERS)),
        *(Goal(worst=1.15), Goal(worst=1.3)),
    ),
    Figure(
        "eager call, host side",
        lambda point: point.measure("farro auto", "host_us"),
        *(Goal(worst=20), Goal(worst=12)),
        less=True,
        unit="us",
    ),
    _triton_speed(256, 600, 800),
    _triton_speed(128, 550, 700),
    Figure(
        "Triton, M = 1, 16, 64, large weights, G256, the read floor over its time",
        _triton_floor(),
        *(Goal(worst=0.6), Goal(worst=0.8)),
    ),
)
QUANTIZE = (
    Figure(
        "M >= 1024, time over the byte floor",
        when(lambda point: point["m"] >= 1024, over_floor),
        *(Goal(worst=1.4), Goal(worst=1.2)),
        less=True,
    ),
)
