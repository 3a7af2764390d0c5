"""Bad arguments: the right error, a message that tells, and nothing written before the checks pass.

Scenario 18: scales of BF16, FP32, e8m0 or uint8 taken for each other, a scale missing and ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farro
from farro import dispatch
from farro.checks import BACKENDS
from farro.testing import guarded

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


def _backends(sample) -> tuple[dict[str, str], ...]:
    """Checks come before the choice of a back end: each gives the same error."""
    return tuple({"backend": b} for b in BACKENDS) if sample.kernels else ({},)


@contextlib.contextmanager
def _refusal(sample, inputs: dict[str, Any], error: type[Exception], *words: str) -> Iterator[Any]:
    """Exactly `error`, with the function's name and `words`; inputs keep their bytes."""
    before = {n: t.clone() for n, t in sample.present(inputs).items() if not t.is_sparse}
    with pytest.raises(error) as raised:
        yield raised
    assert type(raised.value) is error
    message = str(raised.value)
    assert message.startswith(f"{sample.name}: "), message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    for name, tensor in before.items():
        now = inputs[name].view(torch.uint8) if tensor.numel() else tensor.view(torch.uint8)
        assert torch.equal(now, tensor.view(torch.uint8)), name


def _refuses(sample, inputs, changes, error, *words: str, backends=None) -> None:
    """For every back end, by the call and by `explain`, with `out` where there is one."""
    out = {}
    place = None
    if sample.out is not None and "out" not in changes:
        shape, dtype = sample.out(inputs)
        place = guarded(shape, dtype, sample.out_layout, "cpu")
        out = {"out": place.view}
    for backend in backends or _backends(sample):
        for extra in ({}, out) if out else ({},):
            with _refusal(sample, inputs, error, *words):
                sample.function(**{**inputs, **extra, **backend, **changes})
    if sample.kernels:
        with _refusal(sample, inputs, error, *words):
            dispatch.explain(sample.function, **{**inputs, **changes})
    assert place is None or place.changed() == 0, "out was written to before the checks passed"


@pytest.mark.parametrize("value", [[1, 2], "x", 3, 1.5], ids=lambda v: type(v).__name__)
def test_not_a_tensor(value, sample, generator) -> None:
    inputs = sample.first(generator)
    for name in sample.arguments:
        _refuses(sample, inputs, {name: value}, TypeError, name, "tensor", type(value).__name__)


def test_scenario_18_missing_tensors(sample, generator) -> None:
    inputs = sample.first(generator)
    for name, argument in sample.arguments.items():
        if argument.required:
            _refuses(sample, inputs, {name: None}, TypeError, name, "NoneType")
            fewer = {k: v for k, v in inputs.items() if k != name}
            with pytest.raises(TypeError, match=name):
                sample.function(**fewer)
            if sample.kernels:
                with pytest.raises(TypeError, match=name):
                    dispatch.explain(sample.function, **fewer)
        else:
            sample.function(**{**inputs, name: None})


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_scenario_18_each_dtype(dtype, sample, generator) -> None:
    inputs = sample.first(generator)
    for name, tensor in sample.present(inputs).items():
        argument = sample.arguments[name]
        other = torch.full(tensor.shape, argument.fill, dtype=torch.uint8).to(dtype)
        if dtype in argument.dtypes:
            sample.function(**{**inputs, name: other})
            continue
        given = str(dtype).removeprefix("torch.")
        needed = str(argument.dtypes[0]).removeprefix("torch.")
        _refuses(sample, inputs, {name: other}, TypeError, name, given, needed)


def test_each_dtype_of_out(sample, takes_out, generator) -> None:
    inputs = sample.first(generator)
    shape, dtype = sample.out(inputs)
    for other in DTYPES:
        if other != dtype:
            out = torch.zeros(shape, dtype=torch.uint8).to(other)
            given = str(other).removeprefix("torch.")
            _refuses(sample, inputs, {"out": out}, TypeError, "out", given)
    for value in ([1.0], "out", 3):
        _refuses(sample, inputs, {"out": value}, TypeError, "out", type(value).__name__)


def _longer(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.narrow(dimension, 0, 1)), dimension)


def test_shapes(sample, generator) -> None:
    """One element too many in each dimension, and one dimension too many or too few."""
    inputs = sample.first(generator)
    for name, tensor in sample.present(inputs).items():
        if sample.arguments[name].any_shape:
            continue
        for wrong in (
            *(_longer(tensor, d) for d in range(tensor.dim())),
            tensor.unsqueeze(0),
            tensor.unsqueeze(-1),
            tensor[0],
        ):
            _refuses(sample, inputs, {name: wrong}, ValueError, "has shape", "needed")


def test_shapes_of_out(sample, takes_out, generator) -> None:
    inputs = sample.first(generator)
    shape, dtype = sample.out(inputs)
    right = torch.zeros(shape, dtype=dtype)
    for wrong in (*(_longer(right, d) for d in range(right.dim())), right.unsqueeze(0), right[0]):
        given = str(list(wrong.shape))
        _refuses(sample, inputs, {"out": wrong}, ValueError, "out", given, str(list(shape)))
        assert (wrong == 0).all()


def test_sparse_layouts(sample, generator) -> None:
    inputs = sample.first(generator)
    for name, tensor in sample.present(inputs).items():
        if tensor.dim() == 2:
            # to_sparse() looks for zeros, which torch cannot do in FP8
            place, value = torch.zeros(2, 1, dtype=torch.int64), torch.ones(1).to(tensor.dtype)
            sparse = torch.sparse_coo_tensor(place, value, tensor.shape, check_invariants=True)
            changes = {name: sparse}
            _refuses(sample, inputs, changes, ValueError, name, "sparse", "to_dense")


def test_wrong_in_ways_of_their_own(sample, generator) -> None:
    inputs = sample.first(generator)
    for changes, error, words in sample.wrong.values():
        _refuses(sample, inputs, changes, error, *words)


@pytest.mark.parametrize(
    "backend, error",
    [
        ("gpu", ValueError),
        ("", ValueError),
        ("CPU", ValueError),
        ("sm90", ValueError),
        (None, TypeError),
        (3, TypeError),
        (b"cpu", TypeError),
    ],
    ids=repr,
)
def test_backend_names(backend, error, sample, takes_backend, generator) -> None:
    inputs = sample.first(generator)
    words = ["backend"] + (["reference, cpu, triton, cuda"] if error is ValueError else ["str"])
    _refuses(sample, inputs, {"backend": backend}, error, *words, backends=({},))


def test_options_are_keywords_only(sample, takes_backend, generator) -> None:
    inputs = sample.first(generator)
    with pytest.raises(TypeError, match="backends"):
        sample.function(**inputs, backends="cpu")


def test_a_back_end_that_refuses_says_why_and_what_would_run(
    sample, takes_backend, device, generator
) -> None:
    """Each explicit back end runs exactly where explain says so; refusing, it writes nothing."""
    for options in (*sample.variants.values(), *sample.empties.values()):
        inputs = sample.inputs(generator, device, **options)
        for backend in BACKENDS:
            told = dispatch.explain(sample.function, **inputs, backend=backend)
            if told.chosen is not None:
                sample.function(**inputs, backend=backend)
                continue
            place = None
            if sample.out is not None:
                shape, dtype = sample.out(inputs)
                place = guarded(shape, dtype, sample.out_layout, device)
            with pytest.raises(farro.UnsupportedError) as error:
                out = {} if place is None else {"out": place.view}
                sample.function(**inputs, **out, backend=backend)
            message = str(error.value)
            assert f"backend={backend!r}" in message
            reasons = [row.verdict for row in told.rows if row.backend == backend]
            assert all(reason in message for reason in reasons or ["no kernel of this back end"])
            assert "Use backend=" in message and "backend='auto'" in message
            assert place is None or place.changed() == 0


def test_unsupported_is_a_runtime_error() -> None:
    assert issubclass(farro.UnsupportedError, RuntimeError)


@pytest.mark.parametrize("arch", ["sm90", "9.0", "hopper", "", "sm_9", "cuda"])
def test_explain_refuses_unknown_architectures(arch, sample, takes_backend, generator) -> None:
    with pytest.raises(ValueError, match=r"arch: .*sm_90"):
        dispatch.explain(sample.function, **sample.first(generator), arch=arch)


def test_explain_refuses_what_is_not_an_operator(sample, generator) -> None:
    if sample.kernels:
        with pytest.raises(TypeError, match="arch"):
            dispatch.explain(sample.function, **sample.first(generator), arch=90)
        return
    for other in (sample.function, torch.mm, "int8_gemm", 3):
        with pytest.raises(ValueError, match=r"explain: .*known: .*int8_gemm"):
            dispatch.explain(other)
