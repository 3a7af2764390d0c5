"""Native kernels without a GPU: a stand-in for the driver, and facts of their sources."""

from __future__ import annotations

import ctypes
import re
import shutil
import types
from pathlib import Path

import pytest
import torch

from farro.cuda import jit

_BYTES = {"i64": 8, "int": 4, "float": 4}


class Launch:
    """Stands in for farro.cuda.launch.Launch: keeps its arguments, counts how often it ran."""

    def __init__(self, *arguments, **more):
        names = ("device", "function", "grid", "threads", "shared", "cluster", "parameters")
        self.overlaps = False
        self.__dict__.update(zip((*names, "overlaps"), arguments), **more)
        self.fired = 0

    def on_current_stream(self):
        self.fired += 1


def pretend(monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
    """Launches of these modules are kept, not made; descriptors are their arguments."""
    for module in modules:
        monkeypatch.setattr(module, "Launch", Launch)
        monkeypatch.setattr(module, "kernel_function", lambda *what: what)
        monkeypatch.setattr(module.tensor_map, "encode", lambda *what: what)
        monkeypatch.setattr(module.tensor_map, "encode_groups", lambda *what: ("groups", *what))
        monkeypatch.setattr(module.tensor_map, "encode_results", lambda *what: ("results", *what))
    count = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: count)


def buffer(count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """`count` elements that begin `offset` elements past a 16-byte boundary."""
    size = dtype.itemsize
    whole = torch.empty((count + offset) * size + 16, dtype=torch.uint8)
    start = -whole.data_ptr() % 16 + offset * size
    return whole[start : start + count * size].view(dtype)


def matrix(rows, columns, strides=None, offset=0, dtype=torch.float32) -> torch.Tensor:
    """Row-major unless `strides` say otherwise, `offset` elements past a 16-byte boundary."""
    strides = strides or (columns, 1)
    count = (rows - 1) * strides[0] + (columns - 1) * strides[1] + 1 if rows * columns else 1
    return buffer(count, dtype, offset).as_strided((rows, columns), strides)


def laid(rows, columns, how, offset, dtype=torch.float32) -> torch.Tensor:
    """`how` is a gap after a row, a step along it, and whether both dimensions are exchanged."""
    gap, step, turned = how
    if turned:
        return matrix(rows, columns, (step, step * rows + gap), offset, dtype)
    return matrix(rows, columns, (step * columns + gap, step), offset, dtype)


def compiles(text: str, tmp_path: Path) -> None:
    """Compile host-side facts (static_assert) about a kernel's source with NVRTC."""
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'farro[cuda]'")
    for source in re.findall(r'^#include "(/[^"]+)"', text, re.MULTILINE):
        for header in Path(source).parent.glob("*.cuh"):  # they are looked for beside the facts
            shutil.copy(header, tmp_path)
    file = tmp_path / "facts.cu"
    file.write_text(text)
    jit.program(str(file), "sm_90a").compile("cubin")


def fields_of(structure: str, text: str) -> list[tuple[str, int]]:
    """Names and sizes of a C++ structure's fields, in order."""
    body = re.search(rf"struct {structure} \{{(.*?)\}};", text, re.DOTALL)[1]
    fields = []
    for declaration in filter(None, map(str.strip, re.sub(r"//.*", "", body).split(";"))):
        kind, names = re.fullmatch(r"((?:const )?\w+\*?) (.*)", declaration, re.DOTALL).groups()
        size = 8 if kind.endswith("*") else _BYTES[kind]
        fields += [(name.strip(), size) for name in names.split(",")]
    return fields


def sizes_of(structure: type[ctypes.Structure]) -> list[tuple[str, int]]:
    """As fields_of, of its mirror in Python."""
    return [(name, ctypes.sizeof(kind)) for name, kind in structure._fields_]


def offsets_of(name: str, structure: type[ctypes.Structure]) -> str:
    """static_asserts that the C++ structure `name` lies as its mirror does."""
    offsets = [
        f"static_assert(__builtin_offsetof({name}, {field}) == {getattr(structure, field).offset} "
        f"&& sizeof({name}::{field}) == {size});"
        for field, size in sizes_of(structure)
    ]
    return "\n".join([*offsets, f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"])
