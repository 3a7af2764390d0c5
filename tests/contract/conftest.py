"""Parametrization over samples, kernels and devices; forcing one kernel; calling a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farro import dispatch
from farro.arch import arch_named, arch_of, interpreting
from farro.dispatch import Kernel
from farro.testing import poisoned_memory

from .samples import SAMPLES, Sample, tensors

COMPILED = ("triton", "cuda")  # back ends that compile at a first call


# fixtures that leave samples out of a test's parametrization
_FILTERS: dict[str, Callable[[Sample], bool]] = {
    "takes_out": lambda sample: sample.out is not None,
    "takes_backend": lambda sample: sample.kernels,
    "takes_several": lambda sample: len(sample.arguments) > 1,
    "takes_strided_out": lambda sample: sample.out is not None and "columns" in sample.out_layouts,
    "has_rows": lambda sample: any(a.rows is not None for a in sample.arguments.values()),
    "has_float_rows": lambda sample: any(
        a.rows == 0 and any(dtype.is_floating_point for dtype in a.dtypes)
        for a in sample.arguments.values()
    ),
    "records_grad": lambda sample: sample.records_grad,
    "is_forward": lambda sample: not sample.load_time,
    "takes_non_finite": lambda sample: not sample.refuses_non_finite,
}


def _devices(kernel: Kernel | None, cuda_only: bool) -> list[str]:
    """Where a kernel can run at all: features tell, with no GPU asked."""
    needs = frozenset() if kernel is None else kernel.needs
    here = [] if cuda_only or arch_named("cpu").lacks(needs) is not None else ["cpu"]
    return here + ([] if "cpu" in needs else ["cuda"])


def _label(sample: Sample, kernel: Kernel) -> str:
    """The kernel, and the function too where an operator has several."""
    functions = [other for other in SAMPLES if other.operator == sample.operator and other.kernels]
    return kernel.name if len(functions) == 1 else f"{kernel.name}-{sample.name}"


def _is_first(sample: Sample) -> bool:
    return next(s for s in SAMPLES if s.operator == sample.operator) is sample


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`sample` alone: every sample; with `kernel` (as by `run`): each kernel, where it can run.

    With `device` each of them on each device. The fixtures `takes_...`, `has_...`, `is_compiled`,
    `records_grad` and `cuda_only` leave the others out. With `exhaustive` a kernel that a GPU
    compiles at a first call comes twice: with False, and marked slow with True. With
    `first_of_operator` such kernels are marked slow for all functions of an operator but one, with
    `one_function` all kernels and samples are.
    """
    used = metafunc.fixturenames
    names = [n for n in ("sample", "kernel", "device", "exhaustive") if n in used]
    if names == ["device"]:
        metafunc.parametrize(names, ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], True)
    if "sample" not in names:
        return
    cases = []
    for sample in SAMPLES:
        if not all(keep(sample) for name, keep in _FILTERS.items() if name in used):
            continue
        kernels = sample.catalogued.kernels if sample.kernels else ()
        name = sample.function.__name__
        kernels = tuple(k for k in kernels if not k.functions or name in k.functions)
        if "is_compiled" in used:
            kernels = tuple(k for k in kernels if k.backend in COMPILED)
        if "not_reference" in used:
            kernels = tuple(k for k in kernels if k.backend != "reference")
        if "has_configs" in used:
            kernels = tuple(k for k in kernels if k.configs is not None)
        for kernel in kernels if "kernel" in names else (None,):
            for device in _devices(kernel, "cuda_only" in used) if "device" in names else ("cpu",):
                values = {"sample": sample, "kernel": kernel, "device": device}
                label = sample.name if kernel is None else _label(sample, kernel)
                marks = [pytest.mark.gpu] if device == "cuda" else []
                case_id = f"{label}-{device}" if "device" in names else label
                compiles = device == "cuda" and kernel is not None and kernel.backend in COMPILED
                values["exhaustive"] = not compiles
                alone = "one_function" in used or (compiles and "first_of_operator" in used)
                if alone and not _is_first(sample):
                    marks.append(pytest.mark.slow)
                cases.append(pytest.param(*(values[n] for n in names), id=case_id, marks=marks))
                if compiles and "exhaustive" in names:
                    values["exhaustive"], marks = True, [*marks, pytest.mark.slow]
                    given = (values[n] for n in names)
                    cases.append(pytest.param(*given, id=f"{case_id}-exhaustive", marks=marks))
    metafunc.parametrize(names, cases, indirect=["device"] if "device" in names else False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU kernel by kernel: most of the time goes into compiling, which a process does once.

    `make test-gpu` gives each of its processes a run of neighbours.
    """
    folder = Path(__file__).parent
    places = [i for i, item in enumerate(items) if item.path.parent == folder]
    places = [i for i in places if items[i].get_closest_marker("gpu")]
    for i, item in zip(places, sorted((items[i] for i in places), key=_place)):
        items[i] = item


def _place(item: pytest.Item) -> tuple[int, int, int]:
    """Of the operator, of the kernel, and of the function among an operator's."""
    given = item.callspec.params
    sample, kernel = given["sample"], given.get("kernel")
    operators = list(dict.fromkeys(s.operator for s in SAMPLES))
    number = 0 if kernel is None else 1 + sample.catalogued.kernels.index(kernel)
    return operators.index(sample.operator), number, SAMPLES.index(sample)


@pytest.fixture
def first_of_operator() -> None:
    """One function stands for all of its operator, which share their kernels."""


@pytest.fixture
def one_function() -> None:
    """The same, wherever it runs: of a function that is traced for long."""


@pytest.fixture
def takes_out() -> None:
    """Only functions that have an out= argument."""


@pytest.fixture
def takes_backend() -> None:
    """Only functions that have back ends to choose from."""


@pytest.fixture
def takes_several() -> None:
    """Only functions of more than one tensor."""


@pytest.fixture
def takes_strided_out() -> None:
    """Only functions whose out= may have any strides."""


@pytest.fixture
def has_rows() -> None:
    """Only functions of rows that do not depend on each other."""


@pytest.fixture
def has_float_rows() -> None:
    """Only functions of rows of floating point."""


@pytest.fixture
def is_forward() -> None:
    """Not functions of load time: no configurations to choose from, no rows that come and go."""


@pytest.fixture
def takes_non_finite() -> None:
    """Not functions that check values."""


@pytest.fixture
def records_grad() -> None:
    """Only functions whose results require grad where their arguments do."""


@pytest.fixture
def is_compiled() -> None:
    """Only kernels that are compiled at a first call."""


@pytest.fixture
def not_reference() -> None:
    """Not the reference, which would be compared with itself."""


@pytest.fixture
def has_configs() -> None:
    """Only kernels with configurations to choose from."""


@pytest.fixture
def cuda_only() -> None:
    """Not on the CPU."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """As in tests/conftest.py, but parametrized above, together with the kernel."""
    place: str = request.param
    return torch.device(place, torch.cuda.current_device() if place == "cuda" else None)


@pytest.fixture
def fresh() -> Iterator[None]:
    """No decision of an earlier test is remembered, none of this one is left."""
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def run(
    sample: Sample, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Call the sample's function through this kernel alone.

    Other kernels of the same back end are set aside, so an explicit back end means this kernel.
    """
    refuses = Kernel.refuses

    def only_this(self: Kernel, problem: Any) -> str | None:
        if self.backend == kernel.backend and self.name != kernel.name:
            return "set aside by this test"
        return refuses(self, problem)

    monkeypatch.setattr(Kernel, "refuses", only_this)

    def call(inputs: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, ...]:
        return tensors(sample.function(**{**inputs, "backend": kernel.backend, **changes}))

    return call


@pytest.fixture
def refused(sample: Sample, kernel: Kernel) -> Callable[[dict[str, Any]], str | None]:
    """Why this kernel does not take a call, as `explain` says, or None."""

    def ask(inputs: dict[str, Any]) -> str | None:
        rows = dispatch.explain(sample.function, **inputs).rows
        verdict = next(row.verdict for row in rows if row.kernel == kernel.name)
        return None if verdict == "runs" else verdict

    return ask


@pytest.fixture
def accepted(
    sample: Sample,
    kernel: Kernel,
    device: torch.device,
    generator: torch.Generator,
    refused: Callable[[dict[str, Any]], str | None],
) -> Callable[..., list[tuple[str, dict[str, Any]]]]:
    """The sample's variants that this kernel takes, by name, with options replaced.

    `faithful` leaves out those that Triton's interpreter cannot compute exactly.

    Skips where this device or machine cannot run the kernel at all; fails where it takes none of
    the variants, for then nothing would be tested.
    """
    lacking = arch_of(device).lacks(kernel.needs)
    reason = f"needs {lacking}" if lacking else dispatch.not_installed(kernel.backend)
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")

    def variants(faithful: bool = False, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        made = [
            (name, sample.inputs(generator, device, **{**own, **options}))
            for name, own in sample.variants.items()
        ]
        taken = [(name, inputs) for name, inputs in made if refused(inputs) is None]
        assert taken, f"no variant of {sample.name} is for {kernel}: {refused(made[0][1])}"
        return [(n, inputs) for n, inputs in taken if not (faithful and inexact(inputs))]

    return variants


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory from torch.empty is full of NaN and the largest integers; proven before use."""
    with poisoned_memory():
        assert torch.empty(9).isnan().all()
        assert (torch.empty(9, dtype=torch.int8) == 127).all()
        assert torch.empty((2, 3), dtype=torch.bfloat16).isnan().all()
        yield


def inexact(inputs: dict[str, Any]) -> bool:
    """Whether results are only near: Triton's interpreter truncates FP32 to BF16 and FP16."""
    return interpreting() and inputs.get("output_dtype", torch.float32) != torch.float32
