"""The command line: what it prints, how it fails, what it imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
import torch

import farro
from farro.catalogue import OPERATORS
from farro.cli import COMMANDS, Command, lazy
from farro.dispatch import _DESCRIBERS, forget

testing = pytest.importorskip("typer.testing")

NVFP4 = [n for o in OPERATORS if o.name.startswith("nvfp4_") for n in o.functions]
NVFP4 = [name for name in NVFP4 if getattr(farro.nvfp4, name) in _DESCRIBERS]
SIZES = ("--m", "16", "--n", "4096", "--k", "4096")


def run(*arguments: str):
    return testing.CliRunner().invoke(lazy.make_app(), list(arguments), prog_name="farro")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )


def started(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`farro ARGUMENTS` in an interpreter where the blocked modules cannot be imported."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"sys.argv = ['farro', *{arguments!r}]\n"
        "from farro.cli import main\n"
        "main()\n"
    )
    return python(code)


def assert_one_line(result, *parts: str) -> None:
    """Wrong usage: exit code 2, nothing on stdout, one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    for part in parts:
        assert part in result.stderr


class TestInfo:
    def test_text(self):
        result = run("info")
        assert result.exit_code == 0
        for part in (farro.__version__, torch.__version__, "reference", "cpu", "triton", "cuda"):
            assert part in result.stdout

    def test_json_by_python_m(self):
        """A real process, as a bug report would run it."""
        script = [sys.executable, "-m", "farro", "info", "--json"]
        process = subprocess.run(script, capture_output=True, text=True, timeout=120)
        assert (process.returncode, process.stderr) == (0, "")
        found = json.loads(process.stdout)
        assert found["versions"]["farro"] == farro.__version__
        assert found["versions"]["torch"] == torch.__version__
        assert found["cpu"]["threads"] >= 1
        assert isinstance(found["cpu"]["int8_product_exact"], bool)
        assert isinstance(found["cpu"]["addcmul_fused"], bool)
        assert len(found["gpus"]) == torch.cuda.device_count()
        assert set(found["backends"]) == {"reference", "cpu", "triton", "cuda"}
        for name in ("reference", "cpu"):
            end = found["backends"][name]
            assert end["works"] and end["reason"] is None
            assert f"int8_gemm.{name}" in end["kernels"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU makes GPU back ends work")
    def test_back_ends_that_do_not_work_say_why_and_agree_with_is_available(self):
        ends = json.loads(run("info", "--json").stdout)["backends"]
        for name, end in ends.items():
            assert end["works"] == farro.is_available(name)
            assert end["works"] == (end["reason"] is None)
            assert end["works"] == bool(end["kernels"])
        assert not ends["cuda"]["works"]

    def test_probes_are_told(self, monkeypatch):
        from farro.cli import environment

        monkeypatch.setattr(environment, "int8_product_is_exact", lambda: False)
        monkeypatch.setattr(environment, "addcmul_is_fused", lambda: False)
        text = run("info").stdout
        assert "INT8 product NOT exact" in text and "addcmul NOT fused" in text


class TestExplain:
    def test_text_is_farro_explain(self):
        result = run("explain", "int8_gemm", *SIZES, "--arch", "cpu")
        a = torch.empty(16, 4096, dtype=torch.int8, device="meta")
        b = torch.empty(4096, 4096, dtype=torch.int8, device="meta").T
        scale_a, scale_b = torch.empty(16, 16, device="meta"), torch.empty(16, 4096, device="meta")
        want = farro.explain(farro.int8_gemm, a, b, scale_a, scale_b, arch="cpu")
        assert (result.exit_code, result.stdout) == (0, f"{want}\n")
        assert "-> int8_gemm.cpu" in result.stdout

    def test_json_carries_every_option(self):
        options = ("--group-size", "64", "--dtype", "float16", "--arch", "sm_90")
        result = run("explain", "int8_gemm", *SIZES, *options, "--backend", "reference", "--json")
        found = json.loads(result.stdout)
        assert result.exit_code == 0
        assert (found["arch"], found["chosen"]) == ("sm_90", "int8_gemm.reference")
        assert found["params"]["group_size"] == "64"
        assert found["tensors"]["a"]["shape"] == [16, 4096]
        assert found["tensors"]["b"]["stride"] == [1, 4096]
        assert found["tensors"]["scale_b"]["shape"] == [64, 4096]
        assert found["tensors"]["out"] == {
            "shape": [16, 4096],
            "stride": [4096, 1],
            "dtype": "float16",
            "align": 16,
        }

    def test_other_architectures_are_pretended(self):
        found = json.loads(run("explain", "int8_gemm", *SIZES, "--arch", "sm_75", "--json").stdout)
        reasons = {kernel["kernel"]: kernel["reason"] for kernel in found["kernels"]}
        assert reasons["int8_gemm.cpu"] == "needs a CPU; this is sm_75"
        assert found["chosen"] == "int8_gemm.reference"

    @pytest.mark.parametrize("name", ("quantize_int8_groups", "int8_quantize"))
    def test_quantizer(self, name):
        options = ("--m", "5", "--k", "300", "--dtype", "float64", "--group-size", "32", "--json")
        found = json.loads(run("explain", name, *options, "--arch", "cpu").stdout)
        assert found["operator"] == "int8_quantize"
        assert found["tensors"]["x"]["shape"] == [5, 300]
        assert found["tensors"]["x"]["dtype"] == "float64"
        assert found["chosen"] == "int8_quantize.cpu"

    @pytest.mark.parametrize("kind", ("per_tensor", "per_row", "1x128", "128x128"))
    def test_fp8_quantizers(self, kind):
        options = ("--m", "5", "--k", "300", "--arch", "cpu", "--json")
        found = json.loads(run("explain", f"quantize_fp8_{kind}", *options).stdout)
        assert found["operator"] == "fp8_quantize" and found["params"]["kind"] == kind
        assert found["tensors"]["x"]["dtype"] == "bfloat16"
        assert found["chosen"] == "fp8_quantize.cpu"

    @pytest.mark.parametrize("name", NVFP4)
    def test_nvfp4(self, name):
        rows = () if name == "quant_rows" else ("--n", "64")
        options = ("--m", "5", *rows, "--k", "256", "--arch", "sm_90", "--json")
        found = json.loads(run("explain", name, *options).stdout)
        operator = next(o for o in OPERATORS if name in o.functions)
        assert found["operator"] == operator.name
        assert found["chosen"].startswith(f"{operator.name}.")
        slow = found["chosen"].endswith(".reference")
        assert slow == (operator.name == "nvfp4_weights")
        if rows:
            missing = run("explain", name, "--m", "5", "--k", "256")
            assert missing.exit_code != 0 and "needs --n" in missing.output

    def test_this_machine_is_the_default(self):
        found = json.loads(run("explain", "int8_gemm", *SIZES, "--json").stdout)
        arch = "cpu"
        if torch.cuda.is_available():
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        assert found["arch"] == arch

    def test_nothing_that_runs_is_exit_code_1(self):
        result = run("explain", "int8_gemm", *SIZES, "--arch", "sm_90", "--backend", "cpu")
        assert result.exit_code == 1
        assert "nothing runs this: the call would raise farro.UnsupportedError" in result.stdout

    @pytest.mark.parametrize("empty", ("--m", "--n", "--k"))
    def test_empty_problems_are_explained(self, empty):
        assert run("explain", "int8_gemm", *SIZES, empty, "0").exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (("int8_gemm", "--m", "-1", "--n", "8", "--k", "8"), ["'--m'", "0"]),
            (("int8_gemm", "--m", "8", "--n", "-8", "--k", "8"), ["'--n'", "0"]),
            (("int8_gemm", "--m", "8", "--n", "8", "--k", "-8"), ["'--k'", "0"]),
            (("int8_gemm", "--m", str(1 << 40), "--n", "8", "--k", "8"), ["'--m'", str(1 << 30)]),
            (("int8_gemm", "--m", "eight", "--n", "8", "--k", "8"), ["'--m'", "integer"]),
            (("int8_gemm", "--m", "8", "--n", "8"), ["--k"]),
            (("int8_gemm", "--m", "8", "--k", "8"), ["int8_gemm needs --n"]),
            (("quantize_int8_groups", *SIZES), ["leave out --n"]),
            (("quantize_fp8_1x128", *SIZES), ["leave out --n"]),
            (("int4_gemm", *SIZES), ["'int4_gemm'", "known: int8_gemm"]),
            (("int8_gemm", *SIZES, "--group-size", "48"), ["group_size is 48", "32, 64, 128, 256"]),
            (("int8_gemm", *SIZES, "--group-size", "0"), ["group_size is 0"]),
            (("int8_gemm", *SIZES, "--group-size", "-64"), ["group_size is -64"]),
            (("int8_gemm", *SIZES, "--dtype", "int8"), ["--dtype is 'int8'", "bfloat16"]),
            (("int8_gemm", *SIZES, "--dtype", "float64"), ["output_dtype is torch.float64"]),
            (("int8_gemm", *SIZES, "--arch", "hopper"), ["arch: got 'hopper'", "sm_90"]),
            (("int8_gemm", *SIZES, "--backend", "gpu"), ["backend is 'gpu'", "triton"]),
            (("int8_gemm", *SIZES, "--rows", "8"), ["--rows"]),
            (("int8_gemm", "extra", *SIZES), ["extra"]),
        ],
    )
    def test_wrong_usage_is_one_line(self, arguments, parts):
        assert_one_line(run("explain", *arguments), "farro explain: ", *parts)


class TestVerify:
    def test_every_kernel_that_works_here(self):
        result = run("verify", "--device", "cpu", "--quick", "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["ok"]
        kernels = {kernel["kernel"]: kernel for kernel in found["kernels"]}
        assert set(kernels) >= {"int8_gemm.cpu", "int8_quantize.cpu"}
        for kernel in kernels.values():
            assert kernel["passed"] == kernel["cases"] - sum(kernel["refused"].values()) > 10
        left_out = {kernel["kernel"]: kernel["reason"] for kernel in found["not_verified"]}
        assert left_out["int8_gemm.reference"] == "what the others are compared with"

    def test_seeds_are_new_each_time_and_repeatable(self):
        options = ("verify", "--device", "cpu", "--case", "g=32 k=1", "--json")
        seeds = [json.loads(run(*options).stdout)["seed"] for _ in range(2)]
        assert seeds[0] != seeds[1]
        assert json.loads(run(*options, "--seed", "7").stdout)["seed"] == 7

    def test_text_is_a_report(self):
        result = run("verify", "--device", "cpu", "--operator", "int8_gemm", "--case", "empty*")
        for part in (
            f"farro {farro.__version__}",
            "seed: ",
            "int8_gemm.cpu",
            "0 failed",
            "all agree",
        ):
            assert part in result.stdout

    def test_an_operator_goes_by_its_function_s_name_too(self):
        options = ("--operator", "quantize_int8_groups", "--case", "1-D*", "--json")
        found = json.loads(run("verify", "--device", "cpu", *options).stdout)
        assert [kernel["kernel"] for kernel in found["kernels"]] == ["int8_quantize.cpu"]
        assert found["kernels"][0]["cases"] == 3

    def test_a_fault_is_found_told_and_reproduced(self, monkeypatch):
        """One wrong element for one kind of problem: exit code 1, and the command to repeat it."""
        from farro.ops.int8_gemm import cpu

        right = cpu.run

        def wrong(config, a, b, scale_a, scale_b, bias, out, group_size):
            right(config, a, b, scale_a, scale_b, bias, out, group_size)
            if group_size == 128:
                out[-1, -1] += 1000

        options = ("verify", "--device", "cpu", "--operator", "int8_gemm", "--case", "g=*")
        monkeypatch.setattr(cpu, "run", wrong)
        forget()
        try:
            text = run(*options)
            found = run(*options, "--json")
            kernel = json.loads(found.stdout)["kernels"][0]
            again = shlex.split(kernel["failures"][0]["reproduce"])
            repeated = run(*again[1:], "--json")
        finally:
            monkeypatch.undo()
            forget()
        assert (text.exit_code, found.exit_code, repeated.exit_code) == (1, 1, 1)
        assert not json.loads(found.stdout)["ok"]
        failures = kernel["failures"]
        assert len(failures) == kernel["failed"] == kernel["cases"] - kernel["passed"]
        assert all(failure["case"].startswith("g=128") for failure in failures)
        assert "1 of 357 elements differ; first at [16, 20]: got" in failures[0]["what"]
        assert "FAILED g=128" in text.stdout and "farro verify --device cpu" in text.stdout
        assert text.stdout.rstrip().endswith(f"FAILED: {len(failures)} cases")
        assert json.loads(repeated.stdout)["kernels"][0]["failures"] == failures[:1]
        assert run(*again[1:]).exit_code == 0  # mended

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (("--device", "tpu"), ["--device is 'tpu'", "cuda:N"]),
            (("--device", "meta"), ["--device is 'meta'"]),
            (("--device", "cuda:99"), ["--device is 'cuda:99'", "GPUs here"]),
            (("--operator", "int4_gemm"), ["--operator is 'int4_gemm'", "int8_gemm"]),
            (("--backend", "gpu"), ["verify: backend is 'gpu'"]),
            (("--backend", "reference", "--device", "cpu"), ["what the others are compared with"]),
            (("--case", "no such"), ["no case is named 'no such'"]),
            (("--seed", "-1"), ["'--seed'", "0"]),
            (("--quick", "3"), ["3"]),
        ],
    )
    def test_wrong_usage_is_one_line(self, arguments, parts):
        assert_one_line(run("verify", *arguments), "farro verify: ", *parts)


class TestBench:
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (("--device", "tpu"), ["--device is 'tpu'", "cuda:N"]),
            (("--device", "meta"), ["--device is 'meta'"]),
            (("--device", "cuda:99"), ["--device is 'cuda:99'", "GPUs here"]),
            (("int4_gemm",), ["'int4_gemm'", "int8_gemm"]),
            (("--m", "-4"), ["'-4'"]),
        ],
    )
    def test_wrong_usage_is_one_line(self, arguments, parts):
        assert_one_line(run("bench", *arguments), "farro bench: ", *parts)


class TestApplication:
    def test_help_lists_commands_and_imports_no_torch(self):
        result = started(("torch", "transformers", "matplotlib"), "--help")
        assert (result.returncode, result.stderr) == (0, "")
        for name in ("info", "explain", "verify"):
            assert f"  {name} " in result.stdout

    def test_a_command_needs_only_its_own_imports(self):
        absent = ("transformers", "matplotlib", "triton", "numpy", "safetensors", "gguf")
        result = started(absent, "info", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["backends"]["cpu"]["works"]

    def test_every_command_has_help_of_its_own(self):
        for name, command in COMMANDS.items():
            if lazy._exists(command.run):
                result = run(name, "--help")
                assert result.exit_code == 0, result.output
                assert f"Usage: farro {name}" in result.stdout and "--json" in result.stdout

    @pytest.mark.parametrize("missing", ("typer", "rich"))
    def test_without_typer_or_rich(self, missing):
        result = started((missing,), "info")
        assert result.returncode == 2
        assert result.stdout == ""
        message = f"farro: the command line needs {missing}: pip install 'farro[cli]'\n"
        assert result.stderr == message

    def test_a_command_without_its_extra_names_it(self, monkeypatch):
        def load(name):
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

        monkeypatch.setattr(lazy, "_load", load)
        assert_one_line(run("info"), "farro info: needs transformers: pip install 'farro[models]'")

    def test_a_module_of_its_own_that_is_missing_is_a_fault_and_shows(self, monkeypatch):
        def load(name):
            raise ModuleNotFoundError("No module named 'farro.gone'", name="farro.gone")

        monkeypatch.setattr(lazy, "_load", load)
        assert isinstance(run("info").exception, ModuleNotFoundError)

    def test_a_command_without_a_module_is_not_offered(self, monkeypatch):
        monkeypatch.setitem(COMMANDS, "ghost", Command("ghost:ghost_command", "Not there."))
        assert "ghost" not in run("--help").stdout
        assert_one_line(run("ghost"), "farro: No such command 'ghost'")
        assert run("info").exit_code == 0

    def test_wrong_usage_of_farro_itself(self):
        assert_one_line(run("exlpain"), "No such command 'exlpain'", "explain")
        assert_one_line(run("--bogus"), "--bogus")
        assert_one_line(run("info", "extra"), "farro info: ", "extra")
        assert "Usage: farro" in run().output

    def test_version(self):
        result = run("--version")
        assert (result.exit_code, result.stdout) == (0, f"{farro.__version__}\n")

    @pytest.mark.parametrize(
        "error", (ValueError, TypeError, OSError, farro.UnsupportedError), ids=lambda e: e.__name__
    )
    def test_user_errors_are_one_line_and_a_variable_shows_the_rest(self, error, monkeypatch):
        from farro.cli import environment

        def fail():
            raise error("first line\n  second line")

        monkeypatch.setattr(environment, "environment", fail)
        assert_one_line(run("info"), "farro info: first line second line")
        monkeypatch.setenv("FARRO_TRACEBACK", "1")
        assert isinstance(run("info").exception, error)

    def test_faults_of_farro_keep_their_traceback(self, monkeypatch):
        from farro.cli import environment

        monkeypatch.setattr(environment, "environment", lambda: {}["gone"])
        result = run("info")
        assert isinstance(result.exception, KeyError) and result.exit_code == 1

    def test_the_entry_point_is_declared(self):
        from importlib.metadata import entry_points

        found = [e for e in entry_points(group="console_scripts") if e.name == "farro"]
        assert [e.value for e in found] == ["farro.cli:main"]
        from farro.cli import app, main

        assert found[0].load() is main
        assert testing.CliRunner().invoke(app, ["--version"]).exit_code == 0
