"""The wheel holds the code and the data files, asks for torch alone, and works where it is put."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import farro

from .test_import import python

ROOT = Path(__file__).parents[2]
DATA = (".json", ".cu", ".cuh")


def _setuptools() -> int:
    try:
        return int(version("setuptools").partition(".")[0])
    except PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: nothing is left in the checkout, nothing old is packed."""
    if _setuptools() < 77:
        pytest.skip(f"building needs setuptools >= 77, here is {_setuptools()}")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    out = copy / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "-w", str(out), str(copy)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("farro-*.whl")
    return built


def test_wheel_holds_every_file(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "farro").rglob("*")
        if path.suffix in (".py", *DATA) or path.name == "py.typed"
    }
    assert "farro/py.typed" in files
    assert files - packed == set()
    assert {name for name in packed if name.startswith("farro/")} == files


def test_wheel_packs_data_of_each_kind(tmp_path: Path) -> None:
    """The patterns of pyproject.toml, on a tree that has a file of each kind."""
    if _setuptools() < 77:
        pytest.skip(f"building needs setuptools >= 77, here is {_setuptools()}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    slice_ = tmp_path / "src/farro/ops/some_op"
    (slice_ / "tuned").mkdir(parents=True)
    (tmp_path / "src/farro/cuda/include").mkdir(parents=True)
    (tmp_path / "src/farro/__init__.py").write_text('__version__ = "1.2.3"\n')
    for package in ("ops", "ops/some_op", "cuda"):
        (tmp_path / "src/farro" / package / "__init__.py").write_text("")
    wanted = ["ops/some_op/tuned/a.json", "ops/some_op/sm90.cu", "cuda/include/a.cuh", "py.typed"]
    for name in wanted:
        (tmp_path / "src/farro" / name).write_text("{}")
    code = "import setuptools.build_meta as b, sys; sys.argv[1:] = []; print(b.build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "dist").glob("farro-1.2.3-*.whl")
    assert {f"farro/{name}" for name in wanted} <= set(zipfile.ZipFile(built).namelist())


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {n.partition("/")[0] for n in archive.namelist() if ".dist-info/" in n}
    metadata = archive.read(f"{info}/METADATA").decode()
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in needed if "extra ==" not in line] == ["torch>=2.11"]
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    assert extras >= {"triton", "cuda", "cli", "models", "test", "dev"}
    assert f"Version: {farro.__version__}\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert "farro = farro.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert any(name.startswith(f"{info}/licenses/LICENSE") for name in archive.namelist())


def test_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    place = python(
        """
        import torch, farro
        q, s = farro.quantize_int8_groups(torch.ones(2, 64), 64)
        farro.int8_gemm(q, q.T, s, s.T.contiguous(), group_size=64)
        answer = farro.__file__
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert Path(place) == tmp_path / "farro/__init__.py"
