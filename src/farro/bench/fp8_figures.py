"""What the FP8 operators have to reach on an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .figures import Figure, Goal, Point, over

_LARGE = 1 << 24  # bytes of a weight that the second-level cache cannot hide
_SCALED_MM = "torch._scaled_mm"
_BLOCK_PEERS = ("DeepGEMM", f"{_SCALED_MM} 128-block", "Humming")
Value = Callable[[Point], float | None]
Where = Callable[[Point], bool]


def _many(point: Point) -> bool:
    return bool(point["m"] >= 256)


def _few(point: Point) -> bool:
    return bool(point["m"] <= 64)


def _large(point: Point) -> bool:
    return _few(point) and point["n"] * point["k"] >= _LARGE


def _small(point: Point) -> bool:
    return _few(point) and point["n"] * point["k"] < _LARGE


def _peer(variants: tuple[str, ...], where: Where, *names: str) -> Value:
    """The fastest of the peers so named, over ours."""

    def value(point: Point) -> float | None:
        if point["variant"] not in variants or not where(point):
            return None
        return over(point.fastest(*names), point.ours)

    return value


def _floor(variants: tuple[str, ...], where: Where, difference: bool = False) -> Value:
    def value(point: Point) -> float | None:
        ours, floor = point.ours, point.floor
        if point["variant"] not in variants or not where(point) or ours is None or floor is None:
            return None
        return ours - floor if difference else ours / floor

    return value


def _cost(plain: dict[str, str]) -> Value:
    """Of an epilogue: the time of a form over that of the form without."""

    def value(point: Point) -> float | None:
        other = point.of(plain.get(point["variant"], ""))
        return None if other is None else over(point.ours, other.ours)

    return value


def _always(point: Point) -> bool:
    return True


def _few_rows(variants: tuple[str, ...], *names: str) -> Iterator[Figure]:
    yield Figure(
        "M <= 64, weights of 16 MB and more, time over the read floor",
        _floor(variants, _large),
        *(Goal(worst=1.2), Goal(worst=1.12)),
        less=True,
    )
    yield Figure(
        "M <= 64, weights of 16 MB and more, against the fastest peer",
        _peer(variants, _large, *names),
        *(Goal(worst=0.97), Goal(worst=1.0)),
    )
    yield Figure(
        "M <= 64, smaller weights, time less the read floor",
        _floor(variants, _small, difference=True),
        *(Goal(worst=4.0), Goal(worst=2.5)),
        less=True,
        unit="us",
    )


def _same_sums(forms: dict[str, str]) -> Value:
    """Against the peer with the same way of summing; `forms`: variant -> the peer's name."""

    def value(point: Point) -> float | None:
        name = forms.get(point["variant"])
        return None if name is None else over(point.us(name), point.ours)

    return value


_PRECISE, _FAST = f"{_SCALED_MM} precise", f"{_SCALED_MM} fast"
_COMPILED = ", compiled epilogue"
LINEAR = (
    Figure(
        "fast, M >= 256, against _scaled_mm fast",
        _peer(("fast",), _many, _FAST),
        *(Goal(0.95), Goal(1.0, 0.95)),
    ),
    Figure(
        "default, M >= 256, against _scaled_mm precise",
        _peer(("default",), _many, _PRECISE),
        *(Goal(1.0), Goal(1.2)),
    ),
    Figure(
        "default, M >= 256, against _scaled_mm fast",
        _peer(("default",), _many, _FAST),
        *(Goal(0.9), Goal(0.95)),
    ),
    *_few_rows(("default", "fast"), _SCALED_MM),
    Figure(
        "bias, against _scaled_mm(bias=)",
        _same_sums({"bias": _PRECISE, "bias_fast": _FAST}),
        *(Goal(0.95), Goal(1.0)),
    ),
    Figure(
        "GELU or residual, against _scaled_mm and a compiled kernel",
        _same_sums(
            {
                **dict.fromkeys(("gelu", "residual"), _PRECISE + _COMPILED),
                **dict.fromkeys(("gelu_fast", "residual_fast"), _FAST + _COMPILED),
            }
        ),
        *(Goal(1.05), Goal(1.15)),
    ),
    *(
        Figure(
            f"{form}, time over the product's alone",
            _cost({form: "default", f"{form}_fast": "fast"}),
            less=True,
        )
        for form in ("bias", "gelu", "residual")
    ),
)
BLOCKWISE = (
    Figure(
        "all shapes and M, against the best of DeepGEMM, cuBLASLt and Humming",
        _peer(("plain",), _always, *_BLOCK_PEERS),
        *(Goal(0.97, 0.88), Goal(1.05, 0.95)),
    ),
    Figure("M >= 256, against the same", _peer(("plain",), _many, *_BLOCK_PEERS)),
    Figure("M <= 64, against the same", _peer(("plain",), _few, *_BLOCK_PEERS)),
    *_few_rows(("plain",), *_BLOCK_PEERS),
    Figure(
        "bias or GELU, against a product and a compiled kernel",
        _peer(("bias", "gelu"), _always, *_BLOCK_PEERS),
        *(Goal(1.05), Goal(1.15)),
    ),
    *(
        Figure(
            f"{form}, time over the product's alone",
            _cost({form: "plain"}),
            less=True,
        )
        for form in ("columns", "bias", "gelu")
    ),
)

ALONE = "farro product alone"
TWO = "product, compiled SwiGLU + quantize"


def _two_launches(point: Point) -> float | None:
    return over(point.fastest(f"farro {TWO}"), point.ours)


def _little(point: Point) -> float | None:
    small = _few(point) and 2 * point["n"] * point["k"] < 20e6
    return _two_launches(point) if small else None


SWIGLU = (
    Figure(
        "time over the product of 2N x K alone",
        lambda point: over(point.ours, point.us(ALONE)),
        *(Goal(worst=1.1), Goal(worst=1.05)),
        less=True,
    ),
    Figure("against two launches", _two_launches, Goal(worst=1.0), Goal(worst=1.0)),
    Figure(
        "against two launches, weights under 20 MB and M <= 64",
        _little,
        *(Goal(worst=1.0), Goal(worst=1.3)),
    ),
    Figure(
        "against another library's product and a compiled kernel",
        lambda point: over(point.fastest("DeepGEMM", _SCALED_MM), point.ours),
    ),
)


def _quantizer(point: Point) -> float | None:
    return over(point.ours, point.floor) if point["m"] >= 1024 else None


QUANTIZE = (
    Figure(
        "M >= 1024, time over the byte floor",
        _quantizer,
        *(Goal(worst=1.4), Goal(worst=1.2)),
        less=True,
    ),
)
