"""farro verify over processes, and ended early."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from farro.cli import verify, verify_run
from farro.cli.verify_run import Check, Checks, Found
from farro.cli.workers import Died, SpentError
from farro.dispatch import forget
from farro.testing import Outcome

from .test_cli import run

FEW = ("verify", "--device", "cpu", "--operator", "int8_quantize", "--case", "1-D*")
SOME = ("verify", "--device", "cpu", "--operator", "int8_gemm", "--case", "g=32 k=[1-6]*")


def checks(device, *cases):
    return [Check(0, i, "int8_gemm", "int8_gemm.cpu", case, device) for i, case in enumerate(cases)]


def test_processes_give_the_report_of_one():
    reports = [run(*FEW, "--seed", "5", "--json", "--jobs", jobs) for jobs in "12"]
    assert [report.exit_code for report in reports] == [0, 0], reports[1].output
    one, two = (json.loads(report.stdout) for report in reports)
    assert one == two and one["ok"] and one["kernels"][0]["passed"] == 3


def test_a_budget_ends_it_with_a_report():
    result = run(*FEW, "--budget-s", "0", "--json")
    found = json.loads(result.stdout)
    kernel = found["kernels"][0]
    assert result.exit_code == 3 and not found["ok"]
    assert found["ended_early"] == "the 0 s of --budget-s were over"
    assert (kernel["passed"], kernel["not_run"], kernel["cases"]) == (1, 2, 3)
    text = run(*FEW, "--budget-s", "0")
    assert text.exit_code == 3 and "0 refused, 2 not run" in text.stdout
    assert text.stdout.rstrip().endswith(
        "NOT COMPLETE: 2 cases were not run: the 0 s of --budget-s were over"
    )
    everything = run(*FEW, "--budget-s", "1000")
    assert everything.exit_code == 0 and everything.stdout.rstrip().endswith("all agree")


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("wrong", (False, True))
def test_an_interrupt_ends_it_with_a_report(monkeypatch, number, wrong):
    from farro.ops.int8_gemm import cpu

    right, calls = cpu.run, []

    def interrupted(config, a, b, scale_a, scale_b, bias, out, group_size):
        right(config, a, b, scale_a, scale_b, bias, out, group_size)
        calls.append(1)
        if len(calls) == 2 and wrong:
            out.add_(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cpu, "run", interrupted)
    forget()
    try:
        result = run(*SOME, "--json")
    finally:
        monkeypatch.undo()
        forget()
    found = json.loads(result.stdout)
    kernel = found["kernels"][0]
    assert found["ended_early"] == "interrupted" and not found["ok"]
    assert result.exit_code == (1 if wrong else 3)
    assert (kernel["passed"], kernel["failed"]) == ((1, 1) if wrong else (2, 0))
    assert kernel["not_run"] == kernel["cases"] - 2 > 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_dies_is_a_failure_of_its_case(monkeypatch):
    def handed_out(groups, work, jobs, deadline):
        assert list(groups) == [("int8_quantize", "cpu")] and jobs == 2
        cases = [check for bundle in groups["int8_quantize", "cpu"] for check in bundle]
        yield cases[2], Found("ok", "", "cpu")
        yield cases[1], Died(-11)
        yield cases[0], Found("ok", "", "cpu")

    monkeypatch.setattr(verify_run, "handed_out", handed_out)
    result = run(*FEW, "--jobs", "2", "--json", "--seed", "5")
    found = json.loads(result.stdout)["kernels"][0]
    assert (result.exit_code, found["passed"], found["failed"], found["not_run"]) == (1, 2, 1, 0)
    (failure,) = found["failures"]
    assert failure["what"] == "the process that ran it was ended by SIGSEGV"
    assert f"'{failure['case']}' --seed 5" in failure["reproduce"]


@pytest.fixture
def fake_gpus(monkeypatch):
    """Cases on GPUs that are not here: "bad" fails, and with "lost" the GPU is gone."""

    def built(case, device, seed):
        outcome = Outcome("failed" if case in ("bad", "lost") else "ok", f"{case} on {device}")
        state["lost"] |= case == "lost"
        return outcome

    def synchronize(device):
        if state["lost"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    state = {"lost": False}
    monkeypatch.setattr(verify_run, "_cases", lambda operator: {n: n for n in CASES})
    monkeypatch.setattr(verify_run, "_built", built)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


CASES = ("good", "bad", "more", "lost", "last")


def test_workers_are_dealt_over_gpus(fake_gpus):
    work = Checks(0, None, "cuda:0", ("cuda:0", "cuda:1"))
    for number, device in ((0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0")):
        assert [f.device for f in work(number, checks("cuda:0", *CASES[:3]))] == [device] * 3
    assert [f.device for f in work(1, checks("cpu", "good"))] == ["cpu"]


def test_a_fault_that_takes_the_gpu_ends_the_process_and_another_does_not(fake_gpus):
    found = []
    with pytest.raises(SpentError):
        for result in Checks(0)(0, checks("cuda:0", *CASES)):
            found.append(result.status)
    assert found == ["ok", "failed", "ok", "failed"]


def test_one_process_ends_where_the_gpu_is_lost(fake_gpus):
    alone = list(verify_run.run(checks("cuda:0", *CASES), Checks(0), 1))
    assert [check.case for check, _ in alone] == ["good", "bad", "more", "lost"]


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(verify_run, "cpus", lambda: 32)
    monkeypatch.setattr(verify_run, "alike", lambda device: ("cuda:0", "cuda:1"))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert verify._work([cpu], "cpu", None, 7) == (1, Checks(7))
    assert verify._work([cpu], None, 4, 7) == (4, Checks(7, 8))
    assert verify._work([cpu, gpu], None, None, 7) == (16, Checks(7, 2))
    assert verify._work([gpu], "cuda:0", None, 7) == (16, Checks(7, 2))
    assert verify._work([gpu], "cuda", None, 7) == (
        16,
        Checks(7, 2, "cuda:0", ("cuda:0", "cuda:1")),
    )
    assert verify._work([gpu], "cuda", 1, 7) == (1, Checks(7))
    monkeypatch.setattr(verify_run, "cpus", lambda: 6)
    assert verify._work([gpu], "cuda:0", None, 7)[0] == 6
