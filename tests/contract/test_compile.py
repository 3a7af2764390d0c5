"""torch.compile, opcheck, fakes, grad modes. Scenario 12: graph breaks, recompiles for each M."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from farro._ops import is_plain
from farro.testing import assert_bit_equal

from .samples import SAMPLES, tensors

ROWS = (0, 1, 2, 3, 17, 64, 1000)
LATE = (1, 2, 3, 17, 64, 0, 1000)
ORDERS = ("0 first", "0 late")


class _Recorder(TorchDispatchMode):
    """The calls of farro's torch operators, as (operator, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "farro":
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _record(call: Callable[[], Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    with _Recorder() as recorder:
        call()
    return recorder.calls


def _torch_calls(sample, inputs: dict[str, Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """What the sample's function calls, without and with out=."""
    calls = _record(lambda: sample.function(**inputs))
    outputs = {} if sample.outputs is None else sample.outputs(inputs)
    if sample.out is not None:
        outputs["out"] = sample.out(inputs)
    if outputs:
        place = next(iter(sample.present(inputs).values())).device
        given = {name: torch.zeros(s, dtype=d, device=place) for name, (s, d) in outputs.items()}
        calls += _record(lambda: sample.function(**inputs, **given))
    return calls


class _Counting:
    """A backend that counts the graphs it is given, and traces them as inductor's are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return lookup_backend("aot_eager")(module, inputs)


@pytest.fixture
def counting():
    torch._dynamo.reset()
    yield _Counting()
    torch._dynamo.reset()


def _rows_in_three_graphs(dynamic, order, sample, device, generator, counting) -> None:
    compiled = torch.compile(
        lambda inputs: sample.function(**inputs),
        fullgraph=True,
        dynamic=dynamic,
        backend=counting,
    )
    for m in order:
        inputs = sample.first(generator, device, m=m)
        for result, expected in zip(tensors(compiled(inputs)), tensors(sample.function(**inputs))):
            assert result.stride() == expected.stride()
            assert_bit_equal(result, expected, f"M = {m}")
    assert 1 <= counting.graphs <= sample.graphs


@pytest.mark.parametrize("order", [ROWS, pytest.param(LATE, marks=pytest.mark.slow)], ids=ORDERS)
def test_scenario_12_rows_in_three_graphs(
    order, sample, is_forward, device, generator, counting
) -> None:
    _rows_in_three_graphs(None, order, sample, device, generator, counting)


@pytest.mark.parametrize("order", [pytest.param(ROWS, marks=pytest.mark.slow), LATE], ids=ORDERS)
def test_scenario_12_dynamic_rows_in_three_graphs(
    order, sample, is_forward, one_function, device, generator, counting
) -> None:
    _rows_in_three_graphs(True, order, sample, device, generator, counting)


def test_scenario_12_out_in_three_graphs(
    sample, takes_out, one_function, device, generator, counting
) -> None:
    compiled = torch.compile(
        lambda inputs, out: sample.function(**inputs, out=out), fullgraph=True, backend=counting
    )
    for m in ROWS:
        inputs = sample.first(generator, device, m=m)
        shape, dtype = sample.out(inputs)
        out = sample.place(torch.full(shape, 7, dtype=dtype, device=device))
        result = compiled(inputs, out)
        assert result.data_ptr() == out.data_ptr()
        assert_bit_equal(out, *tensors(sample.function(**inputs)), f"M = {m}")
    assert 1 <= counting.graphs <= 3


def test_scenario_12_every_variant_compiles(sample, device, generator, counting) -> None:
    """In one graph each, with work around the call that the graph must keep in order."""

    def call(inputs):
        results = tensors(sample.function(**inputs))
        return tuple(result.clone().view(result.shape) for result in results)

    for name, options in sample.variants.items():
        torch._dynamo.reset()
        counting.graphs = 0
        compiled = torch.compile(call, fullgraph=True, backend=counting)
        inputs = sample.inputs(generator, device, **options)
        for result, expected in zip(compiled(inputs), tensors(sample.function(**inputs))):
            assert_bit_equal(result, expected, name)
        assert counting.graphs == 1


def test_explicit_back_ends_compile(run, accepted, sample, kernel, device, counting) -> None:
    name, inputs = accepted()[0]
    want = run(inputs)
    compiled = torch.compile(
        lambda inputs: sample.function(**inputs, backend=kernel.backend),
        fullgraph=True,
        backend=counting,
    )
    for result, expected in zip(tensors(compiled(inputs)), want):
        assert_bit_equal(result, expected, name)


def test_bad_arguments_raise_when_compiled(sample, device, generator, counting) -> None:
    """A wrong dtype is an error while tracing, never a wrong result."""
    inputs = sample.first(generator, device)
    name, argument = next(iter(sample.arguments.items()))
    dtype = next(d for d in (torch.int32, torch.int16) if d not in argument.dtypes)
    wrong = {**inputs, name: inputs[name].to(dtype)}
    compiled = torch.compile(lambda i: sample.function(**i), fullgraph=True, backend=counting)
    given = str(dtype).removeprefix("torch.")
    with pytest.raises(Exception, match=f"{sample.name}: {name} has dtype {given}"):
        compiled(wrong)


def _allclose(a: torch.Tensor, b: torch.Tensor, **options: Any) -> bool:
    """torch.allclose, which opcheck looks for mutations with and which knows no FP8."""
    fp8 = a.dtype.is_floating_point and a.dtype.itemsize == 1
    return compare_close(*((t.float() if fp8 else t) for t in (a, b)), **options)


compare_close = torch.allclose
_FAKES = "test_faketensor"


def test_opcheck(sample, takes_backend, device, generator, monkeypatch) -> None:
    """Schema, autograd registration, fakes, and tracing with dynamic shapes, of every torch op.

    Traced once: shapes are dynamic, and it takes most of the time.
    """
    monkeypatch.setattr(torch, "allclose", _allclose)
    options = list(sample.variants.values())
    for chosen in (options[0], options[1], {**options[0], "m": 0}):
        inputs = sample.inputs(generator, device, **chosen)
        calls = _torch_calls(sample, inputs)
        assert calls
        for function, args in calls:
            given = {} if chosen is options[0] else {"test_utils": ("test_schema", _FAKES)}
            torch.library.opcheck(function, args, **given)


def test_opcheck_covers_every_torch_op(generator) -> None:
    """Each registered operator is called by some sample (and so checked above)."""
    seen = set()
    for sample in SAMPLES:
        for options in sample.variants.values():
            calls = _torch_calls(sample, sample.inputs(generator, **options))
            seen |= {function.name().partition(".")[0] for function, _ in calls}
    names = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    assert seen == {n for n in names if n.startswith("farro::")} - {"farro::no_backward"}


def test_fakes_are_exact(sample, device, generator) -> None:
    """Shape, dtype, strides and device of what a fake gives, over variants and empty problems."""
    for name, options in {**sample.variants, **sample.empties}.items():
        inputs = sample.inputs(generator, device, **options)
        real = tensors(sample.function(**inputs))
        with FakeTensorMode() as mode:
            given = {
                k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                for k, v in inputs.items()
            }
            fakes = tensors(sample.function(**given))
        assert len(fakes) == len(real)
        for fake, result in zip(fakes, real):
            assert fake.shape == result.shape, name
            assert fake.dtype == result.dtype, name
            assert fake.stride() == result.stride(), name
            assert fake.device == result.device, name


def _with_grad(sample, inputs: dict[str, Any]) -> dict[str, Any]:
    """Every floating-point argument a leaf that requires grad."""
    return {
        name: value.detach().clone().requires_grad_()
        if name in sample.arguments and value is not None and value.dtype.is_floating_point
        else value
        for name, value in inputs.items()
    }


def test_forward_in_any_grad_mode(run, accepted, sample, kernel, device) -> None:
    for name, inputs in accepted():
        want = run(inputs)
        with torch.no_grad():
            without = run(_with_grad(sample, inputs))
        with torch.inference_mode():
            inference = run(_with_grad(sample, inputs))
            copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            inside = run(copies)
        assert all(not result.requires_grad for result in without)
        assert all(result.is_inference() for result in inference)
        outside = run(copies)  # inference tensors, used after the mode has ended
        recorded = run(_with_grad(sample, inputs))
        for results in (without, inference, inside, outside, recorded):
            for result, expected in zip(results, want):
                assert_bit_equal(result, expected, name)


def _differentiable(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    floats = [r for r in results if r.requires_grad]
    assert floats, "no result requires grad, though inputs do"
    return sum(r.float().sum() for r in floats)


def test_backward_raises(run, accepted, sample, records_grad, kernel, device) -> None:
    _, inputs = accepted()[0]
    total = _differentiable(run(_with_grad(sample, inputs)))
    with pytest.raises(RuntimeError, match=r"farro\..*inference.*no_grad"):
        total.backward()


def test_backward_raises_when_compiled(
    sample, takes_backend, records_grad, device, generator, counting
) -> None:
    """Each argument alone requires grad, and all together: the forward compiles and is right."""
    inputs = sample.first(generator, device)
    want = tensors(sample.function(**inputs))
    every = _with_grad(sample, inputs)
    single = [
        {**inputs, name: value}
        for name, value in every.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    for given in (every, *single):
        compiled = torch.compile(lambda i: sample.function(**i), fullgraph=True, backend=counting)
        results = tensors(compiled(given))
        for result, expected in zip(results, want):
            assert_bit_equal(result, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells where the forward was traced
            with pytest.raises(RuntimeError, match=r"farro\..*inference.*no_grad"):
                _differentiable(results).backward()


def test_plain_calls_give_way_to_whoever_watches() -> None:
    """Past the dispatcher go only calls that nothing else has to learn of."""
    x = torch.ones(2, 3)
    assert is_plain(x, None, torch.nn.Parameter(x, requires_grad=False))
    assert not is_plain(x, torch.nn.Parameter(x))
    assert not is_plain(x, x.to("meta"))
    assert not is_plain(x, torch._neg_view(x))
    with forward_ad.dual_level():
        assert not is_plain(x)
    with profile():
        assert not is_plain(x)
    with _Recorder():
        assert not is_plain(x)
    with torch.device("cpu"):
        assert not is_plain(x)
    assert not torch.func.vmap(lambda row: row + is_plain(x))(torch.zeros(2)).any()
    assert is_plain(x)


def test_a_profile_names_the_operator(sample, takes_backend, generator) -> None:
    with profile() as found:
        sample.function(**sample.first(generator, torch.device("cpu")))
    assert any(event.key.startswith("farro::") for event in found.key_averages())


def test_forward_mode_gives_no_tangent(sample, takes_backend, generator) -> None:
    inputs = sample.first(generator, torch.device("cpu"))
    with forward_ad.dual_level():
        dual = {
            name: forward_ad.make_dual(value, torch.ones_like(value))
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
            else value
            for name, value in inputs.items()
        }
        for result in tensors(sample.function(**dual)):
            assert forward_ad.unpack_dual(result).tangent is None


def test_lazy_negations_are_read_as_their_values(run, accepted, sample, kernel, device) -> None:
    for name, inputs in accepted():
        negated = {
            key: torch._neg_view(-value)
            if isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.element_size() > 1  # torch does not negate FP8
            else value
            for key, value in inputs.items()
        }
        for result, expected in zip(run(negated), run(inputs)):
            assert_bit_equal(result, expected, name)


def test_autograd_learns_that_out_was_written(run, accepted, sample, takes_out, device) -> None:
    """Else a backward that saved `out` before would read what it holds now."""
    _, inputs = accepted()[0]
    shape, dtype = sample.out(inputs)
    out = torch.ones(shape, dtype=dtype, device=device)
    product = (torch.ones_like(out, requires_grad=True) * out).sum()
    run(inputs, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_out_in_any_grad_mode(run, accepted, sample, takes_out, kernel, device) -> None:
    for name, inputs in accepted():
        shape, dtype = sample.out(inputs)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            out = sample.place(torch.empty(shape, dtype=dtype, device=device))
            with mode():
                run(_with_grad(sample, inputs), out=out)
            assert not out.requires_grad
            assert_bit_equal(out, *run(inputs), name)
