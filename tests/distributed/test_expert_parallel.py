"""ExpertParallel over gloo, in processes of their own: results, uneven ranks, failures."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farro import parallel_rows
from farro.moe import ExpertParallel
from farro.nn import CompressedWeight, Int8Experts, SparseNVFP4Experts

from . import worker

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


@functools.lru_cache(maxsize=1)
def context():
    """Processes are forked from one that has imported all they need, and has no other threads."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.distributed.worker"])
    return made


def run(world: int, folder: Path, scenarios: list[str], backend: str = "gloo") -> list[str]:
    """What each rank printed; fails where one of them failed."""
    files = [folder / f"rank{rank}" for rank in range(world)]
    ranks = [
        context().Process(
            target=worker.run, args=(backend, rank, world, folder / "store", scenarios, file)
        )
        for rank, file in enumerate(files)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
    told = [file.read_text() for file in files]
    for number, (rank, out) in enumerate(zip(ranks, told)):
        assert rank.exitcode == 0, f"rank {number} ended with {rank.exitcode}:\n{out[-3000:]}"
    return told


def test_two_processes(tmp_path):
    """And the one that stalls in the end takes the other with it, within the timeout."""
    scenarios = ["even", "uneven", "nvfp4", "nvfp4_exact", "argument", "mismatch", "stalls"]
    told = run(2, tmp_path, scenarios)
    assert told[0].split() == [word for name in scenarios for word in ("ok", name)]
    assert "ok stalls" not in told[1] and "ok mismatch" in told[1]


def test_four_processes(tmp_path):
    """And the one that ends in the middle of a call takes the others with it."""
    scenarios = ["even", "uneven", "nvfp4_exact", "argument", "dies"]
    told = run(4, tmp_path, scenarios)
    for rank in (0, 2, 3):
        assert told[rank].split() == [word for name in scenarios for word in ("ok", name)]
    assert "ok argument" in told[1] and "ok dies" not in told[1]


def test_a_rank_whose_experts_raise(tmp_path):
    assert "ok fails" in run(2, tmp_path, ["fails"])[1]


# --- over NCCL, a GPU a process ------------------------------------------------------------------


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")


@pytest.mark.gpu
def test_two_gpus(two_gpus, tmp_path):
    """The bits of one process, for uneven and empty ranks too; wrong arguments end one call."""
    scenarios = ["even", "uneven", "nvfp4", "nvfp4_exact", "argument", "mismatch"]
    told = run(2, tmp_path, scenarios, backend="nccl")
    for rank in range(2):
        for name in scenarios:
            assert f"ok {name}" in told[rank]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ("stalls", "dies", "fails"))
def test_a_lost_rank_ends_the_other_gpu(two_gpus, how, tmp_path):
    """In each case rank 0 raises within the group's timeout, under TORCH_NCCL_BLOCKING_WAIT=1."""
    assert f"ok {how}" in run(2, tmp_path, [how], backend="nccl")[0]


@pytest.mark.gpu
def test_the_watchdog_ends_the_other_gpu(two_gpus, tmp_path):
    """As torch is by default: the process ends, and what it printed tells of the timeout."""
    with pytest.raises(AssertionError, match=r"rank 0 ended with -?[1-9]"):
        run(2, tmp_path, ["watchdog"], backend="nccl")
    told = (tmp_path / "rank0").read_text()
    assert "Watchdog caught collective operation timeout" in told, told[-3000:]
    assert "went on without" not in told


def test_the_example_of_the_documents():
    """With torchrun, as docs/moe.md tells."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = subprocess.run(
        [sys.executable, "-m", *command, "docs/expert_parallel.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.count("equal to one process, bit for bit") == 2


def test_shares_cover_all_experts():
    for experts, world in ((7, 2), (3, 4), (0, 2), (256, 8)):
        shares = [ExpertParallel.share(experts, rank, world) for rank in range(world)]
        assert [first for first, _ in shares] == [0, *[last for _, last in shares[:-1]]]
        assert shares[-1][1] == experts
        assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


def test_few_numbers_of_rows_are_told_apart():
    rounded = [parallel_rows.rounded(rows) for rows in range(5000)]
    assert all(rows <= up <= max(rows * 9 / 8, rows + 1) for rows, up in enumerate(rounded))
    assert len(set(rounded)) < 100


def test_what_it_needs():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ExpertParallel(Int8Experts(1, 32, 32, 32))
    with pytest.raises(TypeError, match="Linear"):
        ExpertParallel(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="CompressedWeight"):
        ExpertParallel(CompressedWeight(1, 32, 32))
    with pytest.raises(ValueError, match="capacity"):
        ExpertParallel(SparseNVFP4Experts(1, 32, 32, capacity=4))
    with pytest.raises(ValueError, match="experts 2 to 2 of 4"):
        SparseNVFP4Experts(4, 32, 32).select(2, 2)
    whole = Int8Experts(4, 32, 32, 32)
    with pytest.raises(ValueError, match="experts 3 to 5 of 4"):
        whole.select(3, 5)
