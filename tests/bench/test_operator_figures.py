"""Figures of INT8, mixtures and NVFP4, from small results that were not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farro.bench import figures, int8_figures, moe_figures, nvfp4_figures
from farro.bench.moe_ffn_products import DOWN

ROOT = Path(__file__).resolve().parents[2]


def rows(sizes, us, floor=1.0, setting=("group_size", 256), **more):
    """Rows of one case: `us` of each subject, and what else each row tells."""
    about = {"set": "default", **sizes, setting[0]: setting[1], "dtype": "bfloat16", "cold": True}
    subjects = {"read floor": floor, **us}
    return [{"subject": name, "us": value, **more, **about} for name, value in subjects.items()]


def gemm(m, n, k, us, floor=1.0, group_size=256, **more):
    return rows({"m": m, "n": n, "k": k}, us, floor, ("group_size", group_size), **more)


def worst(judged):
    return {one["figure"]: one["worst"] for one in judged if one["points"]}


def test_int8_gemm():
    given = [
        *gemm(8192, 4096, 4096, {"farro auto": 10.0, "Humming INT8 G256": 15.0}, tops=1234.0),
        *gemm(8192, 4096, 4096, {"farro auto": 10.0, "farro triton": 11.0}, 1.0, 32, tops=99.0),
        *gemm(
            *(64, 7168, 16384),
            {"farro auto": 12.0, "cuBLAS INT8, no scales": 18.0, "Humming INT8 G256 tuned": 30.0}
            | {"cuBLAS BF16": 1.0, "farro triton": 20.0},
            10.0,
            host_us=17.0,
        ),
        *gemm(64, 7168, 16384, {"farro auto": 14.0}, 10.0, 32),
        *gemm(256, 64, 64, {"farro auto": 2.0, "plain Triton, one dot a group": 3.0}, 1.0, 64),
    ]
    found = worst(figures.judge(int8_figures.GEMM, given))
    few = "M <= 64, G64 to G256, "
    assert found == {
        "G256 at 8192 x 4096 x 4096": 1234.0,
        "G32 at 8192 x 4096 x 4096": 99.0,
        "G256, M >= 1024, against Humming G256, tuned where it was tuned": 1.5,
        f"{few}time over the read floor": 1.2,
        f"{few}against the fastest INT8 peer": 1.5,
        "M = 64, G32, time over the read floor": 1.4,
        "M = 256, against the best INT8 peer with scales of groups": 1.5,
        "eager call, host side": 17.0,
        "Triton, M = 1, 16, 64, large weights, G256, the read floor over its time": 0.5,
    }
    (quantizer,) = figures.judge(
        int8_figures.QUANTIZE, gemm(1024, None, 4096, {"farro auto": 1.3}, 1.0)
    )
    assert quantizer["worst"] == 1.3 and quantizer["needed_met"] and not quantizer["aim_met"]


def test_moe_ffn():
    small = {"n": 768, "k": 2048, "e": 128}
    peers = {"Humming INT8 G256 layer": 60.0, "plain Triton fused MoE": 80.0}
    parts = {"Humming INT8 G256, down alone": 1.0, f"farro cuda, {DOWN}": 15.0}
    given = [
        *rows({"m": 128, **small}, {"farro auto": 40.0, **peers, **parts}, 30.0, graph_us=45.0),
        *rows({"m": 16, **small}, {"farro auto": 40.0, "torch BF16 layer": 44.0}, 30.0),
        *rows({"m": 1, **small}, {"farro auto": 20.0}, 2.0),
        *rows(
            {"m": 8192, "n": 14336, "k": 4096, "e": 8},
            {"farro auto": 50.0, **peers, "farro auto, operators apart": 10.0},
            tops=900.0,
        ),
    ]
    found = worst(figures.judge(moe_figures.LAYER, given))
    large = "T = 8192, DeepSeek-V3 and Mixtral, G256"
    assert found == {
        "T = 16 to 128, the floor + 6 us over the time of a graph": 0.8,
        "T = 16 to 128, against the fastest peer": pytest.approx(1.1),
        "T = 1, the floor + 6 us over the time of a graph": 0.4,
        large: 900.0,
        f"{large}, against the best INT8 peer": 1.2,
        "second product of 128 small experts, 8 rows each, time over its bytes' floor": 1.5,
    }


def group_mm(e, m, n, k, us, floor=1.0, variant="w4a4", **more):
    return rows({"m": m, "n": n, "k": k, "e": e}, us, floor, ("variant", variant), **more)


def test_nvfp4_products():
    fp8, mxfp4 = "DeepGEMM FP8 block, masked", "Humming MXFP4 W4A8"
    given = [
        *group_mm(32, 16, 4096, 7168, {"farro auto": 13.0, fp8: 26.0, mxfp4: 15.6}, 10.0),
        *group_mm(32, 16, 4096, 7168, {"farro auto": 14.3}, 10.0, "fused"),
        *group_mm(128, 8, 2048, 768, {"farro auto": 15.0, fp8: 1.0}, 10.0),
        *group_mm(32, 64, 4096, 7168, {"farro auto": 10.0, mxfp4: 12.0}),
        *group_mm(32, 512, 4096, 7168, {"farro auto": 10.0, fp8: 12.0}, tops=1100.0),
        *group_mm(8, 2048, 28672, 4096, {"farro auto": 10.0}, tops=1200.0),
    ]
    judged = figures.judge(nvfp4_figures.GROUP_MM, given)
    assert [one["worst"] for one in judged] == [
        *(pytest.approx(v) for v in (1.3, 2.0, 1.2, 1.5, 1.2, 1100.0, 1.2, 1.1)),
    ]


def test_nvfp4_layers_and_what_is_around_the_products():
    def moe(m, variant, us, floor=1.0):
        return rows({"m": m, "n": 768, "k": 2048, "e": 128}, us, floor, ("variant", variant))

    two = nvfp4_figures.TWO_CALLS
    given = [
        *moe(16, "gate_up", {"farro auto": 20.0}),
        *moe(16, "fused", {"farro auto": 21.0, two: 25.2}),
        *moe(512, "gate_up", {"farro auto": 30.0}),
        *moe(512, "fused", {"farro auto": 30.0, two: 1.0}),  # the product takes too long
        *moe(16, "layer", {"farro auto": 40.0}, 22.0),
        *moe(1, "layer", {"farro auto": 400.0}, 22.0),
    ]
    found = [one["worst"] for one in figures.judge(nvfp4_figures.MOE, given)]
    assert found == [pytest.approx(1.2), 0.75]
    given = [
        *rows({"m": 64, "n": 8, "k": 64}, {"farro auto": 3.0}, 2.0, ("variant", "quant_act")),
        *rows({"m": 64, "n": 8, "k": 64}, {"farro auto": 9.0}, 2.0, ("variant", "quant_rows")),
        *rows({"m": 1, "n": 8, "k": 64}, {"farro auto": 5.0}, 2.0, ("variant", "quant_rows")),
    ]
    assert [one["worst"] for one in figures.judge(nvfp4_figures.QUANTIZE, given)] == [1.5, 5.0]
    given = rows({"m": 8192, "n": 128, "k": 8}, {"farro auto": 12.0})
    assert [one["worst"] for one in figures.judge(nvfp4_figures.PLAN, given)] == [12.0]
    given += rows({"m": 1, "n": 128, "k": 8}, {"farro auto": 7.0})
    assert [one["worst"] for one in figures.judge(nvfp4_figures.TOKENS, given)] == [12.0, 7.0]


def test_figures_of_a_result_on_disk(tmp_path):
    result = {"operator": "moe_route", "settings": {}}
    result["rows"] = rows({"m": 8192, "n": 128, "k": 8}, {"farro auto": 12.0})
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    command = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "worst 12.000 (needed 15, aim 8)" in done.stdout
    assert done.stdout.rstrip().endswith("1 points: needed met, aim MISSED")


def test_peers_are_called_so():
    """Names of subjects that figures look for, as adapters write them."""
    folder = ROOT / "src" / "farro" / "bench"
    texts = "".join(path.read_text() for path in folder.glob("*.py") if "figures" not in path.name)
    for name in (
        *("plain Triton fused MoE", "Humming INT8 G{group_size} layer", "DeepGEMM FP8 block"),
        *("torch BF16 layer", "torch _scaled_grouped_mm FP8 rows", '"MXFP4 W4A8"', '"FP8 block"'),
        *("farro auto, operators apart", "plain Triton, one dot a group", "INT8, no scales"),
    ):
        assert name in texts, name
