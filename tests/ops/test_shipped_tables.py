"""The tuned tables that come with farro: every row is one that this version can use."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from farro import tuning
from farro.arch import arch_named
from farro.cuda.fp8 import configs as fp8
from farro.ops.int8_gemm import KERNELS, sm90, triton, triton_configs
from farro.ops.moe_ffn import sm90_configs as moe_configs
from farro.ops.moe_ffn.warm import operands
from farro.problem import Problem, TensorSpec

GROUP_SIZES = (32, 64, 128, 256)
SHIPPED = sorted(tuning._OPS.glob("*/tuned/*.json"))
INT8 = [path for path in SHIPPED if path.parts[-3] == "int8_gemm"]


@pytest.fixture(autouse=True)
def as_measured(monkeypatch, tmp_path):
    """No user's table, and the Triton release that the tables were measured with."""
    monkeypatch.setenv("FARRO_TUNED_DIR", str(tmp_path))
    monkeypatch.setattr(triton_configs, "triton_specializes", lambda: True)


def problem_of(m, n, k, group_size, device=""):
    groups = -(-k // group_size)
    tensors = {
        "a": TensorSpec((m, k), (k, 1), torch.int8),
        "b": TensorSpec((k, n), (1, k), torch.int8),
        "scale_a": TensorSpec((m, groups), (groups, 1), torch.float32),
        "scale_b": TensorSpec((groups, n), (n, 1), torch.float32),
        "bias": None,
        "out": TensorSpec((m, n), (n, 1), torch.bfloat16),
    }
    arch = dataclasses.replace(arch_named("sm_90"), device=device)
    return Problem("int8_gemm", arch, tuple(tensors.items()), (("group_size", group_size),))


def test_there_is_one_for_the_h200():
    assert any(path.name == "nvidia_h200.json" for path in INT8)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parts[-3]} {p.stem}")
def test_no_row_is_lost_in_reading(path):
    content = json.loads(path.read_text())
    assert (content["operator"], content["device"]) == (path.parts[-3], path.stem)
    assert {"date", "versions", "commit"} <= content["about"].keys()
    assert len(tuning.table(path.parts[-3], path.stem)) == len(content["rows"]) > 0


@pytest.mark.parametrize("operator", ("fp8_linear", "fp8_blockwise_linear"))
def test_every_row_of_the_fp8_products_is_legal(operator):
    for row in tuning.table(operator, "nvidia_h200"):
        kind = fp8.Kind(operator == "fp8_blockwise_linear", row.get("fast_accum", False))
        config = fp8.Config(**row["config"])
        assert row["backend"] == "cuda" and config.as_dict() == row["config"], row
        assert fp8.refuses(config, kind, row.get("m", 1)) is None, row
        assert "model" in row or row["us"] > 0, row


@pytest.mark.parametrize("path", INT8, ids=lambda p: p.stem)
def test_every_row_is_legal(path):
    parse = {"cuda": lambda c: sm90.Config(**c), "triton": triton_configs.Config.from_dict}
    for row in tuning.table("int8_gemm", path.stem):
        assert row["group_size"] in GROUP_SIZES, row
        if row["backend"] == "auto":
            assert row["config"].keys() == {"backend"}, row
            assert row["config"]["backend"] in {kernel.backend for kernel in KERNELS}, row
            continue
        config = parse[row["backend"]](row["config"])
        assert config.as_dict() == row["config"]
        sizes = (row["m"], row["n"], row["k"]) if "m" in row else (1024, 4096, 4096)
        problem = problem_of(*sizes, row["group_size"])
        if row["backend"] == "cuda":
            assert sm90.is_legal(config, row["group_size"], sizes[0]), row
        else:
            assert triton_configs.refuses(config, problem) is None, row
        if "model" in row:
            assert list(config.tile) == row["tile"] and min(row["model"]) >= 0, row
            assert tuning.predicted_us(row, *sizes, 132) > tuning.LAUNCH_US, row
        else:
            assert row["us"] > 0, row


@pytest.mark.parametrize("path", INT8, ids=lambda p: p.stem)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_it_serves_problems_between_its_rows(path, group_size):
    """Choices are legal, and for sizes that models know none is left to the heuristic."""
    for m in (1, 5, 64, 65, 200, 1000, 3000, 8192, 100000):
        for n, k in ((64, 64), (4096, 4096), (5120, 17408), (24576, 1536)):
            problem = problem_of(m, n, k, group_size, path.stem)
            config = sm90.config(problem)
            assert sm90.is_legal(config, group_size, m), (m, n, k, config)
            if m > 64:
                rows = tuning.table("int8_gemm", path.stem)
                listed = [r["config"] for r in rows if r["backend"] == "cuda"]
                assert config.as_dict() in listed, (m, n, k)
            assert triton.refuses(triton.config(problem), problem) is None
            assert sm90.yields(problem) in (None, "triton is faster here by the tuned table")


def test_every_row_of_moe_ffn_serves_its_problem():
    """Each is legal, and what a call of its sizes takes."""
    arch = dataclasses.replace(arch_named("sm_90"), device="nvidia_h200")
    rows = tuning.table("moe_ffn", "nvidia_h200")
    for row in rows:
        assert row["backend"] == "cuda" and row["us"] > 0, row
        g, shape = row["group_size"], (row["m"], row["n"], row["k"])
        given = operands("meta", shape, row["e"], g, row["topk"], torch.int64)
        params = {"group_size": g, "interleaved": False, "output_dtype": torch.bfloat16}
        problem = Problem.of("moe_ffn", given, params, arch)
        assert moe_configs.config(problem) == moe_configs.Config.from_dict(row["config"]), row
        assert moe_configs.refuses(moe_configs.config(problem), problem) is None, row
    assert {row["group_size"] for row in rows} == {128, 256}
