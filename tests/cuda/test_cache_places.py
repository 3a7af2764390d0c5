"""The compile cache in places that lack something. Needs NVRTC's bindings, but compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from farro import tuning
from farro.cuda import jit

CODE = b"\x7fELF code", "mangled"


@pytest.fixture
def compiles(monkeypatch):
    names = []
    monkeypatch.setattr(jit, "cache_key", lambda *what: "key")
    monkeypatch.setattr(jit, "_compile", lambda source, name, arch: (names.append(name), CODE)[1])
    return names


def test_a_file_system_without_locks_keeps_what_is_compiled(tmp_path, monkeypatch, compiles):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("FARRO_CACHE_DIR", str(tmp_path))
    assert jit.cubin("source", "name", "sm_90a") == jit.cubin("source", "name", "sm_90a") == CODE
    assert compiles == ["name"]


def test_a_user_without_a_home(monkeypatch, compiles):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FARRO_CACHE_DIR", raising=False)
    monkeypatch.delenv("FARRO_TUNED_DIR", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert jit.cubin("source", "name", "sm_90a") == CODE
    assert compiles == ["name"]
    assert tuning.table("an operator", "a device") == ()
