"""Kernel records, and the one choice among them: `select` runs it, `explain` tells it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .arch import Arch, arch_named, interpreting
from .errors import UnsupportedError
from .problem import Problem

F = TypeVar("F", bound=Callable[..., Any])


def _nothing(problem: Problem) -> None:
    return None


def _never(problem: Problem) -> bool:
    return False


@dataclass(frozen=True)
class Kernel:
    """One way to compute an operator, and what it needs.

    `why_not(problem)` is None where it runs, else the reason; `config(problem)` is pure; `run` is
    "module:function" relative to farro, imported when first used; `must_run(problem)` declares
    problems that it may never refuse on an architecture that has `needs`.
    """

    name: str
    backend: str
    run: str
    needs: frozenset[str] = frozenset()
    why_not: Callable[[Problem], str | None] = _nothing
    config: Callable[[Problem], Any] = _nothing
    must_run: Callable[[Problem], bool] = _never
    configs: Callable[[Problem], Iterable[Any]] | None = None  # those that `farro tune` times
    # of configurations and their times: more that are worth a try, as the best parts of several
    further: Callable[[Mapping[Any, float]], Iterable[Any]] | None = None
    # "module:function": (config, problem) compiles to disk what `run` would, without running it
    compile: str = ""
    yields: Callable[[Problem], str | None] = _nothing  # why "auto" leaves it to a later kernel
    bind: str = ""  # "module:function": config -> `run` for calls alike in all but addresses
    functions: frozenset[str] = frozenset()  # of the operator's, those it may run; empty: all

    def refuses(self, problem: Problem) -> str | None:
        """Why this kernel does not run the problem, or None."""
        lacking = problem.arch.lacks(self.needs)
        if lacking is not None:
            return f"needs {lacking}; this is {problem.arch.name}"
        return not_installed(self.backend) or self.why_not(problem)

    def function(self) -> Callable[..., None]:
        return _load(self.run)

    def compiles(self, config: Any, problem: Problem) -> None:
        """Compile to disk what `run` would, where the kernel can without running."""
        if self.compile:
            _load(self.compile)(config, problem)

    def bound(self, config: Any) -> Callable[..., None]:
        """`run` with its configuration, prepared where the kernel can."""
        if self.bind:
            prepared: Callable[..., None] = _load(self.bind)(config)
            return prepared
        return functools.partial(self.function(), config)


@dataclass(frozen=True)
class Operator:
    """One operator of the catalogue: its kernels in order of preference, which share a signature.

    A folder under ops/ defines one of its own name, and more where others belong to it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    functions: tuple[str, ...] = field(default=())  # public names, for the support table
    families: tuple[str, ...] = field(default=())  # farro.<family> has them; the name's stem if ()
    at_top: bool = True  # whether farro itself has them too

    def __post_init__(self) -> None:
        if not self.families:
            object.__setattr__(self, "families", (self.name.partition("_")[0],))

    def first_of(self, backend: str) -> Kernel:
        """The kernel of this back end, the first where it has several."""
        return next(kernel for kernel in self.kernels if kernel.backend == backend)


@dataclass(frozen=True)
class Choice:
    """A kernel that runs a problem, its configuration, and the reasons of those passed over."""

    kernel: Kernel
    config: Any
    refused: tuple[tuple[str, str], ...]

    @functools.cached_property
    def run(self) -> Callable[..., None]:
        return self.kernel.bound(self.config)


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return function


@functools.lru_cache(maxsize=8)
def not_installed(backend: str) -> str | None:
    """What is missing here for a back end to be tried at all, and how to get it."""
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'farro[triton]'"
    if backend == "cuda":
        return _no_native_toolchain()
    return None


def _no_native_toolchain() -> str | None:
    """What native kernels lack: cuda.core, or an NVRTC whose code the driver can load."""
    way_out = "pip install 'farro[cuda]'"
    try:
        if importlib.util.find_spec("cuda.core") is None:
            return f"cuda.core is not installed: {way_out}"
        from .cuda import jit

        compiler = jit.compiler_version()
        driver = jit.driver_version()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: {way_out}"
    except Exception as error:  # NVRTC's library is missing, or is not one
        return f"NVRTC does not load ({str(error).splitlines()[0]}): {way_out}"
    if driver is not None and driver[0] < compiler[0]:
        return (
            f"NVRTC {compiler[0]}.{compiler[1]} is newer than the driver, which knows CUDA "
            f"{driver[0]}.{driver[1]}: install nvidia-cuda-nvrtc of that version"
        )
    return None


def is_available(backend: str) -> bool:
    """Whether `backend` ("reference", "cpu", "triton", "cuda") can run anything on this machine.

    Asks torch for its devices, so it may initialize CUDA; `import farro` alone never does.
    """
    from .checks import check_backend

    check_backend("is_available", backend)
    if backend in ("auto", "reference", "cpu"):
        return True
    if not_installed(backend) is not None:
        return False
    if backend == "triton" and interpreting():
        return True
    import torch

    from .arch import arch_of

    feature = {"triton": "triton", "cuda": "wgmma"}[backend]
    return torch.cuda.is_available() and any(
        feature in arch_of(torch.device("cuda", i)).features
        for i in range(torch.cuda.device_count())
    )


def yields_to(operator: Operator, kernel: Kernel, problem: Problem) -> str | None:
    """Why "auto" passes over a kernel that runs: a later one is faster here, and runs too."""
    reason = kernel.yields(problem)
    if reason is None:
        return None
    later = operator.kernels[operator.kernels.index(kernel) + 1 :]
    faster = any(k.backend != "reference" and k.refuses(problem) is None for k in later)
    return reason if faster else None


@functools.lru_cache(maxsize=4096)
def select(operator: Operator, problem: Problem, backend: str = "auto") -> Choice:
    """The first kernel of `backend` (of any, for "auto") that runs, else UnsupportedError."""
    refused: list[tuple[str, str]] = []
    for kernel in operator.kernels:
        if backend not in ("auto", kernel.backend):
            continue
        reason = kernel.refuses(problem)
        if reason is None and backend == "auto":
            reason = yields_to(operator, kernel, problem)
        if reason is None:
            return Choice(kernel, kernel.config(problem), tuple(refused))
        refused.append((kernel.name, reason))
    if not refused:
        refused.append((f"{operator.name}.{backend}", "no kernel of this back end exists yet"))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    way_out = ""
    if backend != "auto":
        others = [k.backend for k in operator.kernels if k.refuses(problem) is None]
        if others:
            way_out = f". Use backend={others[0]!r} or backend='auto'"
    raise UnsupportedError(
        f"{operator.name}: backend={backend!r} cannot run this on {problem.arch.name}: "
        f"{reasons}{way_out}"
    )


@dataclass(frozen=True)
class Row:
    kernel: str
    backend: str
    verdict: str  # "runs", or the reason why not
    config: Any
    passed: str | None = None  # why "auto" leaves the problem to a later kernel that runs


@dataclass(frozen=True)
class Explanation:
    """What would run and why the rest would not; `str()` is a table, `as_dict()` for programs."""

    problem: Problem
    backend: str
    chosen: str | None
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "operator": self.problem.operator,
            "arch": self.problem.arch.name,
            "backend": self.backend,
            "chosen": self.chosen,
            "tensors": {
                name: None
                if spec is None
                else {
                    "shape": list(spec.shape),
                    "stride": list(spec.stride),
                    "dtype": str(spec.dtype).removeprefix("torch."),
                    "align": spec.align,
                }
                for name, spec in self.problem.tensors
            },
            "params": {k: str(v).removeprefix("torch.") for k, v in self.problem.params},
            "kernels": [
                {
                    "kernel": r.kernel,
                    "backend": r.backend,
                    "runs": r.verdict == "runs",
                    "reason": None if r.verdict == "runs" else r.verdict,
                    "passed": r.passed,
                    "config": None if r.config is None else str(r.config),
                }
                for r in self.rows
            ],
        }

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} {list(s.shape)}" for n, s in self.problem.tensors if s is not None)
        title = f"{self.problem.operator} on {self.problem.arch.name} ({sizes}), {self.backend=!s}"
        title = title.replace("self.", "")
        width = max(len(r.kernel) for r in self.rows)
        lines = [title]
        for row in self.rows:
            mark = "->" if row.kernel == self.chosen else "  "
            config = f"  {row.config}" if row.config is not None else ""
            passed = f" (auto passes: {row.passed})" if row.passed is not None else ""
            lines.append(f"{mark} {row.kernel:<{width}}  {row.verdict}{passed}{config}")
        if self.chosen is None:
            lines.append("nothing runs this: the call would raise farro.UnsupportedError")
        return "\n".join(lines)


# function -> its describer, which takes the function's own arguments
_DESCRIBERS: dict[Any, Callable[..., tuple[Operator, Problem, str]]] = {}


def explained_by(
    describe: Callable[..., tuple[Operator, Problem, str]],
) -> Callable[[F], F]:
    """Register how `explain` turns a function's arguments into a Problem.

    `describe` takes the same arguments and `arch`, checks them, and gives operator, problem and
    back end.
    """

    def register(function: F) -> F:
        _DESCRIBERS[function] = describe
        return function

    return register


def explain(
    function: Callable[..., Any], *args: Any, arch: str | Arch | None = None, **kwargs: Any
) -> Explanation:
    """What `function(*args, **kwargs)` would run, without running it.

    `arch` ("cpu", "sm_90", ... or an Arch) pretends another device; meta tensors are accepted.
    Bad arguments raise what the call would raise. Nothing is printed and nothing computed.
    """
    if not isinstance(function, Hashable) or function not in _DESCRIBERS:
        known = ", ".join(sorted(f.__name__ for f in _DESCRIBERS))
        raise ValueError(f"explain: {function!r} is not an operator of farro; known: {known}")
    pretended = arch if arch is None or isinstance(arch, Arch) else arch_named(arch)
    operator, problem, backend = _DESCRIBERS[function](*args, arch=pretended, **kwargs)
    rows = []
    chosen = None
    for kernel in operator.kernels:
        reason = kernel.refuses(problem)
        passed = None
        if reason is None and backend == "auto":
            passed = yields_to(operator, kernel, problem)
        if (reason or passed) is None and chosen is None and backend in ("auto", kernel.backend):
            chosen = kernel.name
        config = kernel.config(problem) if reason is None else None
        rows.append(Row(kernel.name, kernel.backend, reason or "runs", config, passed))
    return Explanation(problem, backend, chosen, tuple(rows))


_PLANS: dict[int, dict[Any, Any]] = {}  # every dict that `remember` was given, by identity


def remember(plans: dict[Any, Any], key: Any, value: Any, limit: int = 4096) -> None:
    """Keep what a call decided, in a dict that forgets its oldest entry when full."""
    _PLANS[id(plans)] = plans
    insert(plans, key, value, limit)


def insert(plans: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Add to a dict of at most `limit` entries; the oldest leaves. Threads may share the dict."""
    if len(plans) >= limit:
        with contextlib.suppress(RuntimeError):  # another thread has just added or dropped one
            plans.pop(next(iter(plans), None), None)
    plans[key] = value


def forget() -> None:
    """Drop every decision that calls left behind, once what they were made from has changed."""
    select.cache_clear()
    not_installed.cache_clear()
    for plans in list(_PLANS.values()):
        plans.clear()
