"""Scenario 15: `import farro` with torch alone; quiet, lazy, without CUDA, in a forked child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import farro

# Wraps every finder, so that these packages look as if they were not installed
HIDE = """
import sys, importlib.machinery
HIDDEN = {
    "triton", "numpy", "cuda", "typer", "rich", "click", "transformers", "tokenizers", "gguf",
    "matplotlib", "safetensors", "sentencepiece", "hypothesis", "pytest", "PIL", "scipy", "pandas",
}
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import warnings  # torch's own, when it is imported
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
"""


def python(code: str, hide: bool = True, **variables: str) -> Any:
    """Run `code` in a fresh interpreter; what it leaves in `answer`, and nothing may be printed."""
    script = (HIDE if hide else "import sys\n") + textwrap.dedent(code)
    script += "\nimport json; sys.__stdout__.write('ANSWER' + json.dumps(answer))\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    printed, _, answer = done.stdout.rpartition("ANSWER")
    assert (printed, done.stderr) == ("", "")
    return json.loads(answer)


def test_the_hidden_packages_are_hidden() -> None:
    found = python(
        """
        import importlib.util
        answer = [name for name in sorted(HIDDEN) if importlib.util.find_spec(name) is not None]
        for name in HIDDEN:
            try:
                __import__(name)
            except ModuleNotFoundError:
                continue
            answer.append(name)
        """
    )
    assert found == []


def test_scenario_15_import_is_quiet_lazy_and_quick() -> None:
    answer = python(
        """
        import time, warnings
        import torch
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before, start = set(sys.modules), time.perf_counter()
            import farro
            seconds = time.perf_counter() - start
        answer = {
            "warnings": [str(w.message) for w in caught],
            "modules": sorted(set(sys.modules) - before),
            "seconds": seconds,
            "cuda": torch.cuda.is_initialized(),
            "version": farro.__version__,
        }
        """
    )
    assert answer["warnings"] == []
    assert answer["modules"] == ["farro"], "everything else is imported when first used"
    assert answer["seconds"] < 0.5
    assert answer["cuda"] is False
    assert answer["version"] == farro.__version__


def test_scenario_15_everything_works_with_torch_alone() -> None:
    """All public names, the INT8 product and its questions, a module, a model; no CUDA touched."""
    answer = python(
        """
        import warnings
        import torch
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import farro
            for name in farro.__all__:
                getattr(farro, name)
            from farro import *
            x, w = torch.randn(5, 300), torch.randn(7, 300)
            q, s = farro.quantize_int8_groups(x, 64)
            p, t = farro.quantize_int8_groups(w, 64)
            call = (q, p.T, s, t.T.contiguous())
            y = farro.int8_gemm(*call, group_size=64)
            near = (y.float() - x @ w.T).abs().max().item()
            told = farro.explain(farro.int8_gemm, *call, group_size=64, arch="sm_90")
            config = farro.get_kernel_config(q, p.T, group_size=64)
            farro.dequantize_int8_groups(q, s, 64)
            farro.warmup("cpu", shapes=[(2, 8, 40)])
            model = torch.nn.Sequential(torch.nn.Linear(300, 8), torch.nn.Linear(8, 3))
            report = farro.quantize_(model, "int8-g32")
            model(x)
            refused = {}
            for backend in ("triton", "cuda"):
                try:
                    farro.int8_gemm(*call, group_size=64, backend=backend)
                except farro.UnsupportedError as error:
                    refused[backend] = str(error)
            available = [b for b in ("cpu", "triton", "cuda") if farro.is_available(b)]
        foreign = {name.partition(".")[0] for name in sys.modules} & HIDDEN
        answer = {
            "warnings": [str(w.message) for w in caught],
            "near": near, "told": told.as_dict(), "config": config["kernel"],
            "report": str(report), "refused": refused, "available": available,
            "foreign": sorted(foreign), "cuda": torch.cuda.is_initialized(),
        }
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert answer["warnings"] == []
    assert answer["near"] < 2
    assert answer["foreign"] == []
    assert answer["cuda"] is False
    assert answer["told"]["arch"] == "sm_90"
    assert answer["told"]["chosen"] == "int8_gemm.reference"
    assert answer["config"] == "int8_gemm.cpu"
    assert set(answer["refused"]) == {"triton", "cuda"}
    assert answer["available"] == ["cpu"]
    reasons = {k["kernel"]: k["reason"] for k in answer["told"]["kernels"]}
    for kernel, reason in reasons.items():
        for backend, extra in (("triton", "farro[triton]"), ("cuda", "farro[cuda]")):
            if kernel.startswith(f"int8_gemm.{backend}"):
                assert f"pip install '{extra}'" in reason


def test_names_are_what_they_say_whatever_was_imported_first() -> None:
    """A submodule never takes the place of a public name of the package."""
    answer = python(
        """
        import importlib, pkgutil
        import farro
        skipped = []
        for info in pkgutil.walk_packages(farro.__path__, "farro."):
            if info.name == "farro.__main__":
                continue
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                skipped.append((info.name, error.name.partition(".")[0]))
        modules = [n for n in farro.__all__ if type(getattr(farro, n)).__name__ == "module"]
        answer = {"skipped": skipped, "modules": modules, "known": list(farro._MODULES)}
        """
    )
    assert answer["modules"] == answer["known"]
    # what needs more than torch says so by its place: the command line and what serves it
    for name, missing in answer["skipped"]:
        _, place, *inner = name.split(".")
        served = place in ("bench", "evaluation") and inner != []
        last = name.rpartition(".")[2]
        kernel = missing == "triton" and ("triton" in last or "kernel" in last)
        assert place in ("cli", "checkpoints", "integrations") or served or kernel, (name, missing)


def test_all_is_complete() -> None:
    assert len(set(farro.__all__)) == len(farro.__all__)
    assert set(farro.__all__) <= set(dir(farro))
    for name in farro.__all__:
        assert getattr(farro, name) is not None
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = farro.nonesuch


FORK = """
    import multiprocessing
    import torch, farro
    for name in farro.__all__:
        getattr(farro, name)

    def child(queue):
        a = torch.ones(2, 64, dtype=torch.int8, device=DEVICE)
        scale = torch.ones(2, 1, device=DEVICE)
        y = farro.int8_gemm(a, a.T, scale, scale.T.contiguous(), group_size=64)
        queue.put(y.float().cpu().tolist())

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(100)
    answer = {"code": process.exitcode, "y": None if process.exitcode else queue.get()}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scenario_15_forked_child(device: str) -> None:
    """The parent imported farro and all its names; the child is the first to compute."""
    answer = python(FORK.replace("DEVICE", repr(device)), hide=device == "cpu")
    assert answer == {"code": 0, "y": [[64.0, 64.0], [64.0, 64.0]]}
