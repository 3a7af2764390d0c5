"""Tests that run in Triton's CPU interpreter, in a process of their own (see run_again)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import triton


def fused() -> bool:
    """Whether this Triton's interpreter rounds tl.fma once; 3.6's does not."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def run_again(name: str) -> None:
    """Run a file of this folder under pytest; Triton must be told before it is imported."""
    file = Path(__file__).parent / name
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    told = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=file.parents[3], timeout=280
    )
    assert told.returncode == 0, f"{told.stdout[-6000:]}\n{told.stderr[-2000:]}"
    assert " passed" in told.stdout, told.stdout[-2000:]
