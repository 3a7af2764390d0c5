"""The documents tell the truth: Python blocks run, and what they name exists.

A block under `<!-- no-run: reason -->` is not run; one whose reason is "needs a GPU" runs with the
gpu marker, after the blocks above it on the same page.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import shlex
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import farro
from farro.cli import COMMANDS
from farro.dispatch import Kernel
from farro.testing import assert_bit_equal, int8_gemm_cases

markdown_it = pytest.importorskip("markdown_it")
lazy = pytest.importorskip("farro.cli.lazy")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
GPU = "needs a GPU"
NO_RUN = re.compile(r"<!-- no-run: (.+) -->")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    reason: str  # why it is not run; "" where it is


def written(path: Path) -> str:
    """A page without its generated parts, which quote commands of the past."""
    text = path.read_text()
    if text.startswith("<!-- written by docs/generate.py"):
        return ""
    lines = re.compile(r"<!-- generated:.*?<!-- /generated -->", re.DOTALL)
    return lines.sub(lambda part: "\n" * part[0].count("\n"), text)


def parse(text: str) -> list:
    return markdown_it.MarkdownIt("commonmark").enable("table").parse(text)


def blocks(text: str) -> list[Block]:
    found, reason = [], ""
    for token in parse(text):
        if token.type == "fence":
            found.append(Block(token.map[0] + 1, token.info.strip(), token.content, reason))
        comment = NO_RUN.search(token.content) if token.type == "html_block" else None
        reason = comment[1] if comment else ""
    return found


def inline_code(text: str) -> list[str]:
    tokens = [child for token in parse(text) for child in token.children or ()]
    return [token.content for token in tokens if token.type == "code_inline"]


def execute(path: Path, text: str, gpu: AbstractContextManager | None = None) -> dict:
    """Run a page's Python blocks in order, in one namespace; line numbers are the page's.

    Those that need a GPU run in the context `gpu`, if there is one.
    """
    names: dict = {"__name__": f"page_{path.stem}"}
    for block in blocks(text):
        if block.language == "python" and (not block.reason or (gpu and block.reason == GPU)):
            code = compile("\n" * block.line + block.text, str(path), "exec")
            with gpu if gpu and block.reason else contextlib.nullcontext():
                exec(code, names)
    return names


def has_blocks(path: Path, reason: str) -> bool:
    return any(b.language == "python" and b.reason == reason for b in blocks(written(path)))


def pages(reason: str):
    chosen = [path for path in PAGES if has_blocks(path, reason)]
    return pytest.mark.parametrize("path", chosen, ids=lambda path: path.stem)


@pages("")
def test_python_blocks_run(path, capsys):
    with torch.random.fork_rng():
        execute(path, written(path))


@pytest.mark.gpu
@pages(GPU)
def test_python_blocks_that_need_a_gpu_run(path, capsys):
    with torch.random.fork_rng():
        execute(path, written(path), gpu=contextlib.nullcontext())
        torch.cuda.synchronize()


@contextlib.contextmanager
def without_a_gpu():
    """Stand-ins for CUDA: calls choose as on a GPU, and a capture may launch nothing cold."""
    from ..launch_keys import ARCHS, recorded_launches

    with pytest.MonkeyPatch.context() as patch, recorded_launches(ARCHS[-1]) as found:

        @contextlib.contextmanager
        def capture(graph):
            warm = set(found)
            found.clear()
            yield
            cold = [kernel for key, kernel in found.items() if key not in warm]
            assert found and not cold, f"not compiled before the capture: {cold}"

        graph = types.SimpleNamespace(replay=lambda: None)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
        patch.setattr(farro, "warmup", functools.partial(farro.warmup, "cpu"))
        yield


@pages(GPU)
def test_python_blocks_that_need_a_gpu_fit_together(path):
    pytest.importorskip("triton")
    with torch.random.fork_rng():
        execute(path, written(path), gpu=without_a_gpu())


def test_a_capture_of_what_is_cold_is_found(tmp_path):
    pytest.importorskip("triton")
    text = (
        "<!-- no-run: needs a GPU -->\n```python\nimport farro, torch\n"
        "farro.warmup(shapes=[(4, 32, 64)])\nx = torch.randn(4, {}).cuda().bfloat16()\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    farro.quantize_int8_groups(x)\n```\n"
    )
    execute(tmp_path / "page.md", text.format(64), gpu=without_a_gpu())
    with pytest.raises(AssertionError, match="quantize_groups"):
        execute(tmp_path / "page.md", text.format(63), gpu=without_a_gpu())


def test_every_language_and_reason_is_known():
    """So that no block escapes by a typing error."""
    found = [(path.name, block) for path in PAGES for block in blocks(written(path))]
    assert len(found) > 10
    for name, block in found:
        assert block.language in ("python", "sh", ""), f"{name}:{block.line}"
        assert not block.reason or block.language == "python", f"{name}:{block.line}"
        assert block.reason in ("", GPU, "needs a checkpoint"), f"{name}:{block.line}"


def test_a_false_page_is_found(tmp_path):
    fence = "```"
    text = f"a\n\n{fence}python\nx = 1\n{fence}\n\n{fence}python\nassert x == 2\n{fence}\n"
    with pytest.raises(AssertionError) as caught:
        execute(tmp_path / "page.md", text)
    assert caught.traceback[-1].lineno == 7  # counted from 0
    hidden = text.replace(
        "\n```python\nassert", "\n<!-- no-run: needs a GPU -->\n```python\nassert"
    )
    assert execute(tmp_path / "page.md", hidden)["x"] == 1
    with pytest.raises(AssertionError):
        execute(tmp_path / "page.md", hidden, gpu=contextlib.nullcontext())
    for line in (
        "farro verify --no-such-option",
        "farro explain int8_gemm",
        "farro swim",
        "farro explain int8_gemm --m x --k 1",
        "make swim",
        "pip install '.[swim]'",
        "pytest -m swim",
        "pytest no/such/folder",
        "python no/such.py",
        "torchrun --nproc-per-node 2 no/such.py",
        "no/such.sh",
        "swim",
    ):
        with pytest.raises(Exception, match=r"."):
            check_command(shlex.split(line))
    with pytest.raises(AssertionError):
        check_command(["farro", "bench", "--no-such-option"], whole=False)
    for name in ("farro.no_such_name", "farro.nn.Int9Linear"):
        with pytest.raises(AttributeError):
            resolve(name)


def test_the_kernel_of_contributing_is_one():
    """It is named as the contract wants, takes what it must, and gives the reference's bits."""
    path = ROOT / "CONTRIBUTING.md"
    names = execute(path, written(path))
    text = next(b.text for b in blocks(written(path)) if b.text.lstrip().startswith("from farro.d"))
    kernel = eval(text[text.index("Kernel(") :], names)
    assert isinstance(kernel, Kernel) and kernel.name.startswith(f"int8_gemm.{kernel.backend}")
    taken = 0
    for case in int8_gemm_cases():
        call = case.build(seed=taken)
        if kernel.refuses(call.problem) is None and case.quick and call.expected[0].numel():
            given = dict(call.arguments)
            out = torch.full_like(call.expected[0], float("nan"))
            size, _, _ = given.pop("group_size"), given.pop("output_dtype"), given.pop("out", None)
            names["run"](None, **{"bias": None, **given}, out=out, group_size=size)
            assert_bit_equal(out, call.expected[0], case.name)
            taken += 1
    assert taken > 10


# --- commands ------------------------------------------------------------------------------------


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def extras() -> set[str]:
    part = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    return set(re.findall(r"^(\w+) = ", part.partition("\n[")[0], re.MULTILINE))


def check_farro(words: list[str], whole: bool = True) -> None:
    """The command exists and takes these arguments; a part of a line may lack some."""
    if words[1:] == ["COMMAND", "--help"]:
        return
    assert words[1] in COMMANDS, f"farro {words[1]}"
    command = lazy._load(words[1])
    if whole:
        command.make_context("farro", words[2:])
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known, words


def check_pytest(words: list[str]) -> None:
    config = (ROOT / "pyproject.toml").read_text()
    for option, value in zip(words[1:], [*words[2:], ""]):
        if option == "-m":
            for marker in set(re.findall(r"\w+", value)) - {"and", "or", "not"}:
                assert f'"{marker}:' in config, f"no marker {marker}"
        elif not option.startswith("-") and "/" in option:
            assert (ROOT / option).exists(), option


def check_pip(words: list[str]) -> None:
    assert words[1] == "install"
    for extra in re.findall(r"\[(.+?)\]", " ".join(words[2:])):
        assert set(extra.split(",")) <= extras(), extra


def check_command(words: list[str], whole: bool = True) -> None:
    """One line of a shell block: the program is known, its arguments exist."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program = words[0]
    if program == "farro":
        check_farro(words, whole)
    elif program == "make":
        assert {w for w in words[1:] if "=" not in w} <= targets(), words
    elif program == "pip":
        check_pip(words)
    elif program == "pytest":
        check_pytest(words)
    elif program == "torchrun":
        assert (ROOT / words[-1]).exists(), words[-1]
    elif program == "python":
        assert (ROOT / words[1]).exists(), words[1]
    elif "/" in program:
        assert (ROOT / program).exists(), program
    else:
        assert program == "export", f"teach this test to check {program!r}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_shell_commands_exist(path):
    for block in blocks(written(path)):
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                check_command(words[: words.index(">")] if ">" in words else words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_is_named_inline_exists(path):
    for code in inline_code(written(path)):
        if code.startswith(("farro ", "make ")):
            check_command(shlex.split(code), whole=False)
        elif re.match(r"farro\.\w", code):
            resolve(re.match(r"[\w.]+", code)[0])
        elif re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|md|json|cu|cuh|toml)", code):
            places = (ROOT, path.parent, ROOT / "src" / "farro")
            made_up = "mine.py"  # the file that CONTRIBUTING.md tells to write
            assert code.endswith(made_up) or any((p / code).exists() for p in places), code


def resolve(dotted: str) -> object:
    """The object of a dotted name; AttributeError where there is none."""
    found: object = farro
    for name in dotted.split(".")[1:]:
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(f"{found.__name__}.{name}")
            except ImportError:
                raise AttributeError(dotted) from None
    return found


def test_every_variable_is_documented():
    """And no document names one that is not read."""
    pattern = re.compile(r"\bFARRO_[A-Z]+(?:_[A-Z]+)*\b")

    def named(paths: Iterable[Path]) -> set[str]:
        return {name for path in paths for name in pattern.findall(path.read_text())}

    shipped = named((ROOT / "src").rglob("*.py"))
    assert len(shipped) >= 3
    assert named(PAGES) <= shipped | named([ROOT / "tests" / "conftest.py"])
    assert shipped <= named([ROOT / "README.md"])
