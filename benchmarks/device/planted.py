"""Runs kernels of planted.cu, for sanitize.sh to watch: `python planted.py beyond unordered`.

Those named right_... are checked, and named where their results are right.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# as in sanitize_driver.py
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from farro.cuda import tensor_map
from farro.cuda.launch import Launch, kernel_function
from farro.testing import assert_bit_equal

SOURCE = Path(__file__).with_name("planted.cu")


def launch(name, shared, parameters):
    function = kernel_function(str(SOURCE), name, "sm_90a", 0, shared)
    Launch(0, function, (1, 1, 1), 64, shared, 1, parameters).on_current_stream()
    torch.cuda.synchronize()


def fault(name):
    out = torch.zeros(128, dtype=torch.int32).cuda()  # 512 bytes, which no allocator pads
    launch(name, 0, (ctypes.c_void_p(out.data_ptr()),))


def handoff(name):
    """Rows through one stage and two mbarriers, as in the rings of the native kernels."""
    rows = 16
    given = torch.arange(32 * rows, dtype=torch.int32).view(rows, 32)
    there = given.cuda()
    described = tensor_map.encode(there.data_ptr(), rows, 128, 128, 1, 128)
    out = torch.zeros_like(there)
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in (there, out))
    launch(name, 2048, (described, *addresses, ctypes.c_int(rows)))
    if name.startswith("right_"):
        assert_bit_equal(out.cpu(), given.flip(1), name)
        print(f"{name} is right", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (fault if name in ("beyond", "unordered") else handoff)(name)
