"""Compiling native kernels, and the cache of what was compiled. Needs NVRTC, but no GPU."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")

from farro.cuda import jit

HEADER = "#pragma once\nconstexpr int kValue = 41;\n"
SOURCE = """#include "value.cuh"
#ifdef FORBIDDEN
#error "forbidden"
#endif
template <int MORE> __global__ void fill(int* to) { to[threadIdx.x] = kValue + MORE; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("FARRO_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def source(tmp_path):
    """A kernel of one line and its header, as an absolute path that jit takes for a source."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "value.cuh").write_text(HEADER)
    (folder / "fill.cu").write_text(SOURCE)
    return str(folder / "fill.cu")


@pytest.fixture
def compiles(monkeypatch):
    """The kernels compiled so far, by name."""
    names = []
    compile_ = jit._compile

    def counted(source, name, arch):
        names.append(name)
        return compile_(source, name, arch)

    monkeypatch.setattr(jit, "_compile", counted)
    return names


def cubin(source, name="fill<1>", arch="sm_90a"):
    binary, lowered = jit.cubin(source, name, arch)
    assert binary.startswith(b"\x7fELF") and lowered.encode() in binary
    return binary


def only_file(cache):
    (file,) = cache.glob("cubin/*.cubin")
    return file


# --- the key -------------------------------------------------------------------------------------


def test_the_key_holds_all_that_decides_the_code(source, monkeypatch):
    def key(name="fill<1>", arch="sm_90a"):
        return jit.cache_key(source, name, arch)

    first = key()
    assert key() == first
    seen = {first, key("fill<2>"), key(arch="sm_90"), key(arch="sm_100a")}
    with monkeypatch.context() as patch:
        patch.setitem(jit._OPTIONS, "std", "c++17")
        seen.add(key())
    with monkeypatch.context() as patch:
        patch.setitem(jit._OPTIONS, "ftz", True)
        seen.add(key())
    for version in ((12, 9), (13, 99)):
        with monkeypatch.context() as patch:
            patch.setattr(jit, "compiler_version", lambda version=version: version)
            seen.add(key())
    header = Path(source).with_name("value.cuh")
    header.write_text(HEADER.replace("41", "42"))
    seen.add(key())
    header.write_text(HEADER)
    assert key() == first
    Path(source).write_text(SOURCE + "// longer\n")
    seen.add(key())
    assert len(seen) == 10


def test_a_header_of_a_header_counts(source):
    folder = Path(source).parent
    before = jit.cache_key(source, "fill<1>", "sm_90a")
    (folder / "value.cuh").write_text('#include "deeper.cuh"\n' + HEADER)
    (folder / "deeper.cuh").write_text("// one\n")
    one = jit.cache_key(source, "fill<1>", "sm_90a")
    (folder / "deeper.cuh").write_text("// two\n")
    assert len({before, one, jit.cache_key(source, "fill<1>", "sm_90a")}) == 3


@pytest.mark.parametrize("kernel", ("sm90_large.cu", "sm90_small.cu"))
def test_the_text_of_shipped_kernels_holds_their_headers_once(kernel):
    text = jit.source_text(f"ops/int8_gemm/{kernel}")
    for header in ("ptx.cuh", "wgmma.cuh", "output.cuh"):
        assert text.count((jit.INCLUDE / header).read_text()) == 1


def test_the_options_of_the_key_are_those_in_use(source, monkeypatch):
    monkeypatch.setitem(jit._OPTIONS, "define_macro", "FORBIDDEN")
    with pytest.raises(RuntimeError, match=r"fill<1> of .*fill\.cu for sm_90a[^$]*forbidden"):
        jit.cubin(source, "fill<1>", "sm_90a")


def test_headers_of_the_working_directory_are_not_ours(source, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("value.cuh", "ptx.cuh", "wgmma.cuh", "output.cuh"):
        (elsewhere / name).write_text("#error not this one\n")
    monkeypatch.chdir(elsewhere)
    cubin(source)
    name = "int8_gemm_small<BFloat16, 256, 8, 1, 4, 0, 1, 1, 1, 1>"
    assert jit.cubin("ops/int8_gemm/sm90_small.cu", name, "sm_90a")[0]


# --- the files -----------------------------------------------------------------------------------


def test_a_warm_hit_compiles_nothing_and_writes_nothing(source, cache, compiles):
    first = cubin(source)
    file = only_file(cache)
    written = file.stat().st_mtime_ns
    only_file(cache).with_suffix(".lock").unlink()
    assert cubin(source) == first
    assert compiles == ["fill<1>"]
    assert file.stat().st_mtime_ns == written and not file.with_suffix(".lock").exists()
    assert not list(cache.glob("cubin/*.part"))


def test_kernels_do_not_share_files(source, cache, compiles):
    assert cubin(source) != cubin(source, "fill<2>")
    assert cubin(source, arch="sm_80") != cubin(source)
    assert compiles == ["fill<1>", "fill<2>", "fill<1>"]
    assert len(list(cache.glob("cubin/*.cubin"))) == 3


def damages():
    def flipped(data):
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]

    return {
        "empty": lambda data: b"",
        "a few bytes": lambda data: data[:5],
        "header alone": lambda data: data[: data.index(b"{")],
        "half": lambda data: data[: len(data) // 2],
        "all but one byte": lambda data: data[:-1],
        "one byte more": lambda data: data + b"\0",
        "one bit flipped": flipped,
        "a bare cubin": lambda data: data[data.index(b"\x7fELF") :],
        "an older version": lambda data: data.replace(b"farro-cubin-2", b"farro-cubin-1", 1),
        "not JSON": lambda data: data.replace(b"{", b"\xff", 1),
        "JSON of another kind": lambda data: jit._MAGIC + b"[1]\n" + data,
        "a name missing": lambda data: data.replace(b'"name"', b'"nime"', 1),
        "a text file": lambda data: b"# notes\n" * 99,
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_compiled_again(damage, source, cache, compiles):
    good = cubin(source)
    file = only_file(cache)
    whole = file.read_bytes()
    file.write_bytes(damages()[damage](whole))
    assert cubin(source) == good
    assert compiles == ["fill<1>"] * 2
    assert file.read_bytes() == whole
    cubin(source)
    assert len(compiles) == 2


def test_another_keys_file_is_foreign(source, cache, compiles):
    cubin(source)
    one = only_file(cache)
    cubin(source, "fill<2>")
    (two,) = set(cache.glob("cubin/*.cubin")) - {one}
    two.write_bytes(one.read_bytes())
    binary, name = jit.cubin(source, "fill<2>", "sm_90a")
    assert "ILi2E" in name and name.encode() in binary
    assert compiles == ["fill<1>", "fill<2>", "fill<2>"]


def test_a_directory_in_place_of_the_file(source, cache, compiles):
    good = cubin(source)
    file = only_file(cache)
    file.unlink()
    file.mkdir()
    assert cubin(source) == good
    assert len(compiles) == 2 and not list(cache.glob("cubin/*.part"))


def test_no_directory_can_be_made(source, tmp_path, monkeypatch, compiles):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FARRO_CACHE_DIR", str(tmp_path / "file"))
    assert cubin(source) == cubin(source)
    assert len(compiles) == 2  # in memory; a process asks once a kernel, through load()


def test_a_directory_that_can_only_be_read(source, cache, monkeypatch, compiles):
    good = cubin(source)
    shipped = only_file(cache)

    def refuse(self, *rest, **named):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert cubin(source) == good and len(compiles) == 1
    cubin(source, "fill<2>")
    assert compiles == ["fill<1>", "fill<2>"]
    assert [f for f in shipped.parent.iterdir() if f.suffix != ".lock"] == [shipped]


def test_a_full_disk_leaves_no_part(source, cache, monkeypatch, compiles):
    write = Path.write_bytes

    def full(self, data):
        write(self, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cubin(source)
    assert len(compiles) == 1
    assert [f.suffix for f in (cache / "cubin").iterdir()] == [".lock"]


def test_where_the_cache_is(monkeypatch, tmp_path, source):
    monkeypatch.setenv("FARRO_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert jit.cache_directory() == tmp_path / "elsewhere"
    cubin(source)
    assert len(list((tmp_path / "elsewhere" / "cubin").glob("*.cubin"))) == 1
    monkeypatch.delenv("FARRO_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_directory() == tmp_path / "home" / ".cache" / "farro"


# --- processes -----------------------------------------------------------------------------------

# jit.py alone, without torch: eight imports of that would take a minute
RACER = """
import importlib.util, os, sys, time
from pathlib import Path
path, source, log, gate = sys.argv[1:]
spec = importlib.util.spec_from_file_location("farro_jit", path)
jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)
compile_ = jit._compile

def counted(*args):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.3)  # the others arrive meanwhile
    return compile_(*args)

jit._compile = counted
jit.compiler_version()
Path(gate, str(os.getpid())).touch()
while len(os.listdir(gate)) < 8:
    time.sleep(0.01)
binary, name = jit.cubin(source, "fill<1>", "sm_90a")
print(len(binary), name)
"""


def test_eight_processes_compile_once(source, tmp_path, cache):
    gate, log = tmp_path / "gate", tmp_path / "log"
    gate.mkdir()
    command = [sys.executable, "-c", RACER, jit.__file__, source, str(log), str(gate)]
    racers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    told = []
    try:
        for racer in racers:
            out, error = racer.communicate(timeout=120)
            assert racer.returncode == 0, error[-2000:]
            told.append(out)
    finally:
        for racer in racers:
            racer.kill()
    assert len(log.read_text().split()) == 1
    assert len(set(told)) == 1 and told[0].split()[0] == str(len(cubin(source)))
    assert len(log.read_text().split()) == 1
    assert sorted(f.suffix for f in (cache / "cubin").iterdir()) == [".cubin", ".lock"]


def test_a_lock_file_left_behind_stops_nobody(source, cache, compiles):
    cubin(source)
    only_file(cache).unlink()  # its lock file stays
    cubin(source)
    assert len(compiles) == 2


# --- errors --------------------------------------------------------------------------------------


def test_a_broken_kernel_names_itself(source, cache):
    Path(source).write_text(SOURCE.replace("kValue", "kNothing"))
    with pytest.raises(RuntimeError) as caught:
        jit.cubin(source, "fill<1>", "sm_90a")
    for part in ("fill<1>", "fill.cu", "sm_90a", "kNothing"):
        assert part in str(caught.value)
    assert not list(cache.glob("cubin/*.cubin")) and not list(cache.glob("cubin/*.part"))


def test_nothing_compiles_under_capture(source, monkeypatch, compiles):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"fill<3> .* being captured; call farro\.warmup\(\)"):
        jit.load(source, "fill<3>", "sm_90a")
    assert compiles == []
