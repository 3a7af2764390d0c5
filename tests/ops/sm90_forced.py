"""Forcing configurations of the native SM90 int8_gemm in tests on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from farro.arch import arch_of
from farro.dispatch import not_installed
from farro.ops.int8_gemm import KERNELS, reference, sm90
from farro.ops.int8_gemm.sm90 import Config
from farro.testing import assert_bit_equal

KERNEL = KERNELS[0]
GROUP_SIZES = (32, 64, 128, 256)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

LARGE, NARROW = Config("large", 256, 128, 4, raster=4), Config("large", 128, 112, 6, raster=4)
SMALL, PAIRED = Config("small", 16, 64, 8, 1, ahead=True), Config("small", 32, 64, 5, 2, early=True)
SOME = (LARGE, NARROW, SMALL, PAIRED)  # legal at every group size; compiled for every output type


def shapes(policy, group_size):
    """One legal configuration of each tile, number of warpgroups and way to promote.

    The few-rows kernel's clusters and CTAs beside each other come in turn.
    """
    if policy == "large":
        tiles = itertools.product(sm90._ROWS[policy], sm90._COLUMNS[policy])
        return [_legal(Config(policy, *tile, 6, raster=4), group_size) for tile in tiles]
    spreads = ({}, {"cluster": 2}, {"row_cluster": 2}, {"resident": 2}, {"resident": 3})
    found = []
    forms = itertools.product(sm90._ROWS[policy], (1, 2, 4), sm90._orders(group_size))
    for i, (rows, consumers, order) in enumerate(forms):
        plain = Config(policy, rows, 64, 6, consumers, raster=4, **order)
        for more in (spreads[i % len(spreads)], {}):
            config = _legal(dataclasses.replace(plain, **more), group_size)
            if config is not None:
                found.append(config)
                break
    return found


def _legal(config, group_size):
    """With a ring that fits, or None."""
    rings = (dataclasses.replace(config, stages=stages) for stages in (6, 4, 3))
    return next((c for c in rings if sm90.is_legal(c, group_size)), None)


# jit.py alone, without torch, so that a process starts at once
_WORKER = """
import importlib.util, json, sys
path, wanted = sys.argv[1], json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("farro_jit", path)
jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)
for source, name in wanted:
    jit.cubin(source, name, "sm_90a")
"""


def compile_all(wanted):
    """Compile (source, name) pairs into the cache, on all cores.

    Workers of pytest -n that need the same kernels wait for the first, and find them done.
    """
    from farro.cuda import jit

    with jit.locked(jit.cache_directory() / "tests.lock"):
        missing = [
            each for each in sorted(set(wanted)) if not jit.cubin_path(*each, "sm_90a").exists()
        ]
        _compile(jit.__file__, missing, min(os.cpu_count() or 1, len(missing)))


def _compile(jit, wanted, count):
    command = [sys.executable, "-c", _WORKER, jit]
    pool = []
    for i in range(count):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdin.write(json.dumps(wanted[i::count]))
        process.stdin.close()
        process.stdin = None  # communicate would flush it
        pool.append(process)
    failed = [told for process in pool if (told := _ended(process))]
    assert not failed, failed[0][-2000:]


def _ended(process):
    """What a process told of its failure, or nothing."""
    told = process.communicate(timeout=250)[1]
    return (told or f"exit {process.returncode}") if process.returncode else ""


def skip_without_it():
    if "wgmma" not in arch_of(torch.device("cuda", torch.cuda.current_device())).features:
        pytest.skip("the native kernel needs SM90a")
    reason = not_installed("cuda")
    if reason is not None:
        pytest.skip(reason)


def padded(rows, columns, generator):
    """Codes as a slice of a wider matrix: rows begin at multiples of 16 bytes, K at column 16."""
    pitch = -(-columns // 16) * 16 + 48
    whole = torch.randint(-128, 128, (rows, pitch), generator=generator, dtype=torch.int8)
    return whole.cuda()[:, 16 : 16 + columns]


def operands(m, n, k, group_size, generator, values=()):
    """a, b, scale_a, scale_b and no bias; a tenth of the scales are among `values`."""
    groups = -(-k // group_size)
    scales = [torch.randn(s, generator=generator) for s in ((m, groups), (groups, n))]
    if values:
        for scale in scales:
            chosen = torch.rand(scale.shape, generator=generator) < 0.1
            which = torch.randint(len(values), scale.shape, generator=generator)
            scale.copy_(torch.where(chosen, torch.tensor(values)[which], scale))
    a, weight = padded(m, k, generator), padded(n, k, generator)
    return a, weight.T, scales[0].cuda(), scales[1].cuda(), None


def expected(inputs, group_size, dtype=FP32):
    out = torch.empty(inputs[0].shape[0], inputs[1].shape[1], dtype=dtype, device="cuda")
    reference.run(None, *inputs, out, group_size)
    return out


def same(out, want, what):
    """Bit equality, judged on the GPU where nothing differs."""
    kind = torch.int32 if out.dtype is FP32 else torch.int16
    if not torch.equal(out.contiguous().view(kind), want.contiguous().view(kind)):
        assert_bit_equal(out, want, str(what))


def forced(config, inputs, group_size, dtype=FP32, out=None):
    """The kernel with one configuration, into poisoned memory; a plain `out` has guards around."""
    guard = None
    if out is None:
        shape = inputs[0].shape[0] + 2, inputs[1].shape[1]
        guard = torch.empty(shape, dtype=dtype, device="cuda").fill_(float("nan"))
        out = guard[1:-1]
    out.fill_(float("nan"))
    KERNEL.function()(config, *inputs, out, group_size)
    if guard is not None:
        assert guard[0].isnan().all() and guard[-1].isnan().all(), f"{config} wrote beside out"
    return out
