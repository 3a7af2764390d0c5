"""Shared by all tests: GPU tests, and fresh random data whose seed a failure tells."""

from __future__ import annotations

import os
import re
import secrets
import zlib

import pytest

# OpenMP threads that spin between tiny operators take ten times as long where other jobs run too;
# it reads this once, when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# the processes of pytest -n share the cores
os.environ.setdefault(
    "OMP_NUM_THREADS",
    str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))),
)

import torch

_SEED = int(os.environ.get("FARRO_TEST_SEED") or secrets.randbits(32))


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {gpu}; to repeat this run's data: FARRO_TEST_SEED={_SEED}"


def pytest_configure(config: pytest.Config) -> None:
    """`-m gpu` without a GPU would skip every test and end as a success: an error instead."""
    asked = re.sub(r"\bnot\s+gpu\b", "", config.option.markexpr or "")
    if not re.search(r"\bgpu\b", asked) or config.option.collectonly:
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"-m {config.option.markexpr!r} asks for the tests that need an NVIDIA GPU, and "
            "torch.cuda.is_available() is False here: none of them would run. Leave out -m for "
            "those that need none"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and torch.cuda.is_available() is False")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed:
        report.sections.append(("random data", f"repeat with FARRO_TEST_SEED={_SEED}"))
    return report


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device a test runs on: the CPU, and with `-m gpu` the current GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator, fresh for each test and each run; FARRO_TEST_SEED repeats a run."""
    seed = zlib.crc32(f"{_SEED}/{request.node.nodeid}".encode())
    return torch.Generator().manual_seed(seed)
