"""The catalogue is complete and consistent, and every operator in it is under contract."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
import torch

import farro
from farro import _ops, arch, catalogue, dispatch, ops, warming
from farro.catalogue import OPERATORS, operator_named, warmers
from farro.checks import BACKENDS
from farro.dispatch import Kernel, Operator

from .samples import CHECKS, QUESTIONS, uncovered

KERNELS = [(operator, kernel) for operator in OPERATORS for kernel in operator.kernels]
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
by_kernel = pytest.mark.parametrize("operator, kernel", KERNELS, ids=[k.name for _, k in KERNELS])


def test_every_folder_is_an_operator() -> None:
    folders = {info.name for info in pkgutil.iter_modules(ops.__path__)}
    assert folders <= {operator.name for operator in OPERATORS}
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)
    modules = {id(catalogue._MODULES[operator]) for operator in OPERATORS}
    assert len(modules) == len(folders)
    assert all(operator_named(operator.name) is operator for operator in OPERATORS)
    with pytest.raises(ValueError, match=r"no operator is named 'int9_gemm'.*int8_gemm"):
        operator_named("int9_gemm")


def test_every_public_function_has_a_sample() -> None:
    assert uncovered() == [], "add a Sample to tests/contract/samples"


def test_a_missing_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = Operator("int9_gemm", (Kernel("int9_gemm.reference", "reference", "x:y"),), ("mm9",))
    monkeypatch.setattr("tests.contract.samples.OPERATORS", (*OPERATORS, extra))
    assert uncovered() == ["mm9", "int9_gemm"]


@by_operator
def test_public_functions_are_where_the_table_of_names_says(operator: Operator) -> None:
    first, *others = [getattr(farro, family) for family in operator.families]
    for name in operator.functions:
        function = getattr(first, name)
        assert function.__doc__ and len(function.__doc__) > 80
        assert all(name in family.__all__ for family in (first, *others))
        assert all(getattr(family, name) is function for family in others)
        assert getattr(farro, name, None) is (function if operator.at_top else None)


def test_functions_that_compute_take_a_backend(sample) -> None:
    parameters = inspect.signature(sample.function).parameters
    assert ("backend" in parameters) == sample.kernels
    if sample.kernels:
        assert parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters["backend"].default == "auto"


@by_operator
def test_the_reference_comes_last_and_needs_nothing(operator: Operator) -> None:
    last = operator.kernels[-1]
    assert last.backend == "reference"
    assert last.needs == frozenset()
    assert [k.backend for k in operator.kernels].count("reference") == 1


@by_operator
def test_back_ends_in_order_of_preference(operator: Operator) -> None:
    """The CPU's own kernels come before Triton's, which run there in the interpreter."""
    order = [k.backend for k in operator.kernels]
    assert order == sorted(order, key=["cuda", "cpu", "triton", "reference"].index)


@by_kernel
def test_kernel_records(operator: Operator, kernel: Kernel) -> None:
    assert kernel.name.startswith(f"{operator.name}.{kernel.backend}")
    assert kernel.backend in BACKENDS[1:]
    assert kernel.needs <= set(arch.FEATURE_TEXT)
    assert [k.name for k in operator.kernels].count(kernel.name) == 1
    assert kernel.must_run is not dispatch._never, "declare the problems it must run"


@by_kernel
def test_run_functions_share_one_signature(operator: Operator, kernel: Kernel) -> None:
    if dispatch.not_installed(kernel.backend):
        pytest.skip(str(dispatch.not_installed(kernel.backend)))
    want = list(inspect.signature(operator.kernels[-1].function()).parameters)
    assert list(inspect.signature(kernel.function()).parameters) == want
    assert want[0] == "config"


def test_every_torch_op_belongs_to_an_operator() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("farro::")]
    names_of = [(o.name, *(f"{family}_" for family in o.families)) for o in OPERATORS]
    stems = tuple(stem for names in names_of for stem in names)
    own = [n.removeprefix("farro::") for n in names if n != "farro::no_backward"]
    assert len(own) >= len(OPERATORS)
    assert all(name.startswith(stems) for name in own), own
    assert _ops.NAMESPACE == "farro"


def test_warmup_knows_every_operator() -> None:
    known = {function for operator in OPERATORS for function in operator.functions}
    assert set(warmers()) == known
    calls = warming.warmup("cpu", shapes=[(2, 8, 40)])
    assert calls >= len(OPERATORS)
    assert 0 < warming.warmup("cpu", ["int8_gemm"], [(2, 8, 40)]) < calls
    with pytest.raises(ValueError, match=r"nonesuch.*int8_gemm"):
        warming.warmup("cpu", ["nonesuch"])
    shape = [(2, 8, 40)]
    assert warming.warmup("cpu", "int8_gemm", shape) == warming.warmup("cpu", ["int8_gemm"], shape)


def test_warmup_refuses_what_is_no_shape_or_device() -> None:
    for shapes, error in (
        ([(2, 8)], ValueError),
        ((2, 8, 40), ValueError),
        ([(2, -8, 40)], ValueError),
        ([(2, 8.0, 40)], TypeError),
    ):
        with pytest.raises(error, match=r"warmup: .*shapes.*needed|warmup: .*must be an int"):
            warming.warmup("cpu", shapes=shapes)
    for device in ("nonesuch", 3.5):
        with pytest.raises(ValueError, match=f"warmup: device is {device!r}; needed"):
            warming.warmup(device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"warmup: device is 'cuda'.*'cpu'"):
            warming.warmup("cuda")


def test_questions_compute_nothing() -> None:
    """They are exempt from having a sample because they answer with plain values."""
    a, b = (torch.empty(5, 64, dtype=torch.int8, device="meta") for _ in range(2))
    nvfp4 = farro.nvfp4
    answers = {
        "get_kernel_config": farro.get_kernel_config(a, b.T, group_size=64),
        "select_fp8_linear_tile": farro.select_fp8_linear_tile(5, 5, 64),
        "group_mm_configs": nvfp4.group_mm_configs(),
        "all_tactics": nvfp4.all_tactics(),
        "suggest_tactic": nvfp4.suggest_tactic(9),
        "valid_clusters": nvfp4.valid_clusters("auto"),
        "interleave_gate_up_rows": nvfp4.interleave_gate_up_rows(8),
    }
    assert set(answers) == set(QUESTIONS)
    keys = "policy compute_capability backend kernel tile stages warps why"
    assert set(answers["get_kernel_config"]) == set(keys.split())
    assert isinstance(answers["select_fp8_linear_tile"], str)


def test_checks_give_nothing() -> None:
    """They are exempt from having a sample because there is no result to compare."""
    answers = {"check_routing": farro.check_routing(torch.zeros(2, 3, dtype=torch.int64), 4)}
    assert answers == dict.fromkeys(CHECKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_available(backend: str) -> None:
    assert isinstance(farro.is_available(backend), bool)
    if backend in ("auto", "reference", "cpu"):
        assert farro.is_available(backend)
    elif not torch.cuda.is_available() and not arch.interpreting():
        assert not farro.is_available(backend)


@pytest.mark.parametrize("backend, error", [("gpu", ValueError), (None, TypeError)])
def test_is_available_refuses(backend: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="is_available: backend"):
        farro.is_available(backend)  # type: ignore[arg-type]
