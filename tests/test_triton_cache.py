"""Triton's cache on disk: damaged files, places that cannot be written, processes that race.

Everything is compiled for SM90, for which no GPU is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.cache import FileCacheManager

from farro import triton_cache
from farro.ops.int8_quantize import triton as quantizer
from farro.triton_cache import checked_cache
from farro.triton_launch import compile_only


def compiled(group_size=32) -> bytes:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    q = torch.empty(4, 64, dtype=torch.int8, device="meta")
    scale = torch.empty(4, 64 // group_size, device="meta")
    config = quantizer.Config(1, 1, 1)
    kernel, _, args, options = quantizer.prepare(config, x, q, scale, group_size)
    code: bytes = compile_only(kernel, args, options, (9, 0)).asm["cubin"]
    assert code.startswith(b"\x7fELF")
    return code


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FARRO_CACHE_DIR", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hits(monkeypatch):
    """Of each kernel asked for: whether it came from the cache."""
    found = []
    listen = lambda **about: found.append(about["cache_hit"])  # noqa: E731
    monkeypatch.setitem(knobs.compilation.__dict__, "listener", listen)
    return found


def the(cache, pattern) -> Path:
    (file,) = cache.glob(f"*/{pattern}")
    return file


def _cut(data):
    return data[:20]


DAMAGE = {
    "20 bytes of metadata": ("quantize_groups.json", _cut),
    "metadata of nothing": ("quantize_groups.json", lambda data: b"{}"),
    "metadata of another form": ("quantize_groups.json", lambda data: b"[]"),
    "an empty cubin": ("quantize_groups.cubin", lambda data: b""),
    "half a cubin": ("quantize_groups.cubin", lambda data: data[: len(data) // 2]),
    "one bit of a cubin": ("quantize_groups.cubin", lambda data: data[:-1] + b"\x01"),
    "another text": ("quantize_groups.ptx", lambda data: b"\xff\xfe"),
    "no cubin": ("quantize_groups.cubin", None),
    "a list of a group": ("__grp__quantize_groups.json", lambda data: b"[1]"),
    "a group of a list": ("__grp__quantize_groups.json", lambda data: b'{"child_paths": [1]}'),
    "a group elsewhere": (
        "__grp__quantize_groups.json",
        lambda data: json.dumps({"child_paths": {"quantize_groups.json": "/dev/null"}}).encode(),
    ),
    "no digests": ("__sha256__quantize_groups.json", None),
    "digests of nothing": ("__sha256__quantize_groups.json", lambda data: b""),
    "digests of another form": ("__sha256__quantize_groups.json", lambda data: b'{"key": 3}'),
}


def test_scenario_11_what_is_damaged_is_compiled_again(cache, hits):
    good = compiled()
    for name, (pattern, damage) in DAMAGE.items():
        hits.clear()
        file = the(cache, pattern)
        whole = file.read_bytes()
        if damage is None:
            file.unlink()
        else:
            assert damage(whole) != whole
            file.write_bytes(damage(whole))
        assert compiled() == good, name
        assert compiled() == good, name
        assert hits == [False, True], name
        assert the(cache, pattern).stat().st_size == len(whole), name


def test_scenario_11_another_keys_files_are_foreign(cache, hits):
    one = compiled(32)
    folder = the(cache, "quantize_groups.cubin").parent
    two = compiled(64)
    assert one != two
    (other,) = set(cache.iterdir()) - {folder}
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert compiled(64) == two
    assert hits == [False, False, False]


def test_what_a_plain_triton_left_is_checked_too(cache, hits):
    """Without digests nothing tells a whole file from half of one."""
    good = compiled()
    the(cache, "__sha256__quantize_groups.json").unlink()
    the(cache, "quantize_groups.cubin").write_bytes(b"")
    assert compiled() == good and hits == [False, False]


@pytest.mark.parametrize("place", ["/dev/null/x", "a file"])
def test_scenario_11_where_nothing_can_be_written_a_directory_of_the_process_serves(
    place, tmp_path, monkeypatch, hits
):
    (tmp_path / "file").write_text("")
    given = str(tmp_path / "file" / "x") if place == "a file" else place
    monkeypatch.setenv("TRITON_CACHE_DIR", given)
    triton_cache._warn.cache_clear()
    triton_cache._temporary.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be written.*TRITON_CACHE_DIR") as told:
        good = compiled()
        assert compiled() == good and hits == [False, True]
    assert len(told) == 1 and str(Path(given)) in str(told[0].message)
    assert os.environ["TRITON_CACHE_DIR"] == given


def test_scenario_11_a_cache_that_can_only_be_read_serves(cache, hits, monkeypatch):
    good = compiled(32)
    before = sorted(p for p in cache.rglob("*") if p.name != "lock")
    put = FileCacheManager.put

    def refuse(self, data, filename, binary=True):
        if self.cache_dir.startswith(str(cache)):
            raise OSError(30, "Read-only file system")
        return put(self, data, filename, binary)

    monkeypatch.setattr(FileCacheManager, "put", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(32) == good
    triton_cache._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        compiled(64)
    assert hits == [False, True, False]
    after = sorted(p for p in cache.rglob("*") if p.is_file() and p.name != "lock")
    assert after == [p for p in before if p.is_file()]


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("FARRO_CACHE_DIR", raising=False)
    usual = triton_cache.directory()
    assert usual == Path(knobs.cache.get_triton_dir("cache"))
    monkeypatch.setenv("FARRO_CACHE_DIR", str(tmp_path / "farro"))
    assert triton_cache.directory() == tmp_path / "farro" / "triton"
    compiled()
    assert the(tmp_path / "farro" / "triton", "quantize_groups.cubin")
    assert "TRITON_CACHE_DIR" not in os.environ and Path(knobs.cache.dir) == usual
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert triton_cache.directory() == tmp_path / "triton"


def test_a_manager_of_the_users_own_is_left_alone(cache, monkeypatch):
    class Own(FileCacheManager):
        pass

    monkeypatch.setitem(knobs.cache.__dict__, "manager_class", Own)
    with checked_cache():
        assert knobs.cache.manager_class is Own
    compiled()
    assert knobs.cache.manager_class is Own
    assert not list(cache.glob("*/__sha256__*"))


def test_triton_is_as_before_afterwards(cache):
    before = dict(knobs.cache.__dict__)
    inside, done = threading.Barrier(2), threading.Event()

    def other():
        with checked_cache():
            inside.wait()
            done.wait()
            assert knobs.cache.manager_class is not None

    thread = threading.Thread(target=other)
    with checked_cache():
        thread.start()
        inside.wait()
    assert knobs.cache.manager_class is not None  # the other thread is still in there
    done.set()
    thread.join()
    with pytest.raises(KeyError), checked_cache():
        raise KeyError
    assert knobs.cache.__dict__ == before and knobs.cache.manager_class is None


def test_a_compiler_that_fails_holds_no_lock(cache, monkeypatch):
    manager = triton_cache._manager()
    with pytest.raises(KeyError) as kept, checked_cache():  # the exception keeps its frames
        first = manager("ABC")
        assert first.get_group("x.json") is None and first.lock is not None
        raise KeyError
    monkeypatch.setattr(triton_cache, "_PATIENCE_S", 0.05)
    with checked_cache():
        second = manager("ABC")
        assert second.get_group("x.json") is None and second.lock is not None
        third = manager("ABC")
        assert third.get_group("x.json") is None and third.lock is None  # has waited enough
    assert kept.value is not None


def test_a_launcher_of_tritons_own_is_checked(cache):
    """Shared libraries are in no group; those that Triton left without a digest are taken."""
    with checked_cache():
        manager = triton_cache._manager()("ABC")
        path = Path(manager.put(b"code", "launch.so"))
        assert manager.get_file("launch.so") == str(path)
        path.write_bytes(b"")
        assert manager.get_file("launch.so") is None
        Path(f"{path}.sha256").unlink()
        assert manager.get_file("launch.so") == str(path)


RACE = """
import os, sys
from triton import knobs
from tests.test_triton_cache import compiled

log = sys.argv[1]
def listen(**about):
    with open(log, "a") as file:
        file.write("hit\\n" if about["cache_hit"] else "compiled\\n")

knobs.compilation.listener = listen
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        try:
            compiled()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0] * 8, codes
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes of this test are forked")
def test_scenario_11_eight_processes_on_a_cold_cache_compile_once(cache, tmp_path):
    log = tmp_path / "log"
    root = Path(__file__).parents[1]
    told = subprocess.run(
        [sys.executable, "-c", RACE, str(log)],
        cwd=root,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert sorted(log.read_text().split()) == ["compiled", *["hit"] * 7]
    assert not list(cache.glob("*/tmp.*"))
