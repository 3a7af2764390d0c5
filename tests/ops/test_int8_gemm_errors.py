"""Every error of int8_gemm: its type, its message, and that `out` was not written."""

from __future__ import annotations

import re

import pytest
import torch

import farro
from farro.arch import interpreting

M, N, K, G = 4, 6, 128, 64
SENTINEL = 42.0


def arguments():
    return {
        "a": torch.ones(M, K, dtype=torch.int8),
        "b": torch.ones(N, K, dtype=torch.int8).T,
        "scale_a": torch.ones(M, K // G),
        "scale_b": torch.ones(K // G, N),
        "group_size": G,
        "bias": torch.ones(N),
        "out": torch.full((M, N), SENTINEL, dtype=torch.bfloat16),
    }


def int8(*shape):
    return torch.ones(*shape, dtype=torch.int8)


# changed arguments, exception, what its message says
ERRORS = {
    "a missing": ({"a": None}, TypeError, "a must be a tensor, got NoneType"),
    "a is a list": ({"a": [[1]]}, TypeError, "a must be a tensor, got list"),
    "scale_a missing": ({"scale_a": None}, TypeError, "scale_a must be a tensor, got NoneType"),
    "scale_b missing": ({"scale_b": None}, TypeError, "scale_b must be a tensor, got NoneType"),
    "bias is a number": ({"bias": 1.0}, TypeError, "bias must be a tensor, got float"),
    "out is a list": ({"out": []}, TypeError, "out must be a tensor, got list"),
    "a uint8": ({"a": int8(M, K).byte()}, TypeError, "a has dtype uint8; needed int8: quantize_"),
    "a float": ({"a": torch.ones(M, K)}, TypeError, "a has dtype float32; needed int8"),
    "b bfloat16": (
        {"b": torch.ones(K, N, dtype=torch.bfloat16)},
        TypeError,
        "b has dtype bfloat16; needed int8",
    ),
    "scale_a bfloat16": (
        {"scale_a": torch.ones(M, 2, dtype=torch.bfloat16)},
        TypeError,
        r"scale_a has dtype bfloat16; needed float32: pass scale_a.float\(\)",
    ),
    "scale_a bytes of e8m0": (
        {"scale_a": torch.ones(M, 2, dtype=torch.uint8)},
        TypeError,
        "scale_a has dtype uint8; needed float32",
    ),
    "scale_b float64": (
        {"scale_b": torch.ones(2, N, dtype=torch.float64)},
        TypeError,
        "scale_b has dtype float64; needed float32",
    ),
    "bias int32": (
        {"bias": torch.ones(N, dtype=torch.int32)},
        TypeError,
        "bias has dtype int32; needed bfloat16 or float16 or float32",
    ),
    "output_dtype a name": (
        {"output_dtype": "bfloat16"},
        TypeError,
        "output_dtype must be a torch.dtype, got str",
    ),
    "output_dtype float64": (
        {"output_dtype": torch.float64},
        TypeError,
        "output_dtype is torch.float64; needed bfloat16, float16, float32",
    ),
    "out of another dtype": (
        {"out": torch.full((M, N), SENTINEL)},
        TypeError,
        "out has dtype torch.float32 and output_dtype is torch.bfloat16; pass output_dtype=",
    ),
    "backend not a name": ({"backend": 1}, TypeError, "backend must be a str, got int"),
    "backend unknown": (
        {"backend": "gpu"},
        ValueError,
        "backend is 'gpu'; needed one of auto, reference, cpu, triton, cuda",
    ),
    "a one-dimensional": (
        {"a": int8(K)},
        ValueError,
        r"a has shape \[128\]; needed \[M,K\]: flatten leading dimensions with a.reshape\(-1, K\)",
    ),
    "a three-dimensional": ({"a": int8(2, M, K)}, ValueError, r"a has shape \[2, 4, 128\]"),
    "b of another K": ({"b": int8(K + 1, N)}, ValueError, "needed .K,N. with K = 128 of a$"),
    "b not transposed": (
        {"b": int8(N, K)},
        ValueError,
        r"b has shape \[6, 128\]; needed \[K,N\] with K = 128 of a: pass b.T of a weight \[N,K\]",
    ),
    "b packed for another group size": (
        {"b": int8(1, 128, N)},
        ValueError,
        r"b has shape \[1, 128, 6\]; needed \[2, 64, 6\], that is the group-packed",
    ),
    "scale_a of another group size": (
        {"scale_a": torch.ones(M, 1)},
        ValueError,
        r"scale_a has shape \[4, 1\]; needed \[4, 2\], that is \[M, ceil\(K/G\)\]",
    ),
    "scale_a one-dimensional": ({"scale_a": torch.ones(M)}, ValueError, r"scale_a has shape \[4\]"),
    "scale_b transposed": (
        {"scale_b": torch.ones(N, 2)},
        ValueError,
        r"scale_b has shape \[6, 2\]; needed \[2, 6\], that is \[ceil\(K/G\), N\]",
    ),
    "bias of another N": (
        {"bias": torch.ones(N + 1)},
        ValueError,
        r"bias has shape \[7\]; needed \[6\], that is \[N\]",
    ),
    "bias of one row": ({"bias": torch.ones(1, N)}, ValueError, r"bias has shape \[1, 6\]"),
    "out of another shape": (
        {"out": torch.full((N, M), SENTINEL, dtype=torch.bfloat16)},
        ValueError,
        r"out has shape \[6, 4\]; needed \[4, 6\], that is \[M,N\]",
    ),
    "out overlapping": (
        {"out": torch.full((20,), SENTINEL, dtype=torch.bfloat16).as_strided((M, N), (2, 1))},
        ValueError,
        r"out has strides \[2, 1\] for shape \[4, 6\], so its elements overlap",
    ),
    "out on another device": (
        {"out": torch.empty(M, N, dtype=torch.bfloat16, device="meta")},
        ValueError,
        "out is on meta and a on cpu; all tensors must be on one device",
    ),
    "b on another device": (
        {"b": torch.ones(K, N, dtype=torch.int8, device="meta")},
        ValueError,
        "b is on meta and a on cpu",
    ),
    "bias on another device": (
        {"bias": torch.ones(N, device="meta")},
        ValueError,
        "bias is on meta and a on cpu",
    ),
}
EXPANDED = {
    "a": int8(1, K).expand(M, K),
    "b": int8(1, N).expand(K, N),
    "scale_a": torch.ones(M, 1).expand(M, 2),
    "scale_b": torch.ones(1, N).expand(2, N),
    "bias": torch.ones(1).expand(N),
    "out": torch.full((1, N), SENTINEL, dtype=torch.bfloat16).expand(M, N),
}
ERRORS |= {
    f"{name} expanded": (
        {name: tensor},
        ValueError,
        rf"{name} has strides .*0.*; a zero stride \(expand\) is refused: pass {name}",
    )
    for name, tensor in EXPANDED.items()
}
ERRORS |= {
    f"{name} sparse": (
        {name: arguments()[name].to_sparse()},
        ValueError,
        rf"{name} has layout torch.sparse_coo; needed a strided tensor: pass {name}.to_dense\(\)",
    )
    for name in ("a", "b", "scale_a", "scale_b", "bias")
}
ERRORS |= {
    f"group_size {value!r}": (
        {"group_size": value},
        ValueError,
        rf"group_size is {re.escape(repr(value))} \({type(value).__name__}\); "
        "needed an int among 32, 64, 128, 256",
    )
    for value in (0, 1, 16, 48, 512, -32, True, 64.0, "64", None)
}


@pytest.mark.parametrize("change, exception, message", ERRORS.values(), ids=ERRORS)
def test_a_wrong_argument_is_named_and_nothing_is_written(change, exception, message):
    given = {**arguments(), **change}
    with pytest.raises(exception, match=rf"^int8_gemm: .*{message}"):
        farro.int8_gemm(**given)
    out = given["out"]
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert (out == SENTINEL).all()


@pytest.mark.parametrize("name", [n for n, e in ERRORS.items() if "out" not in e[0]])
def test_the_same_without_out(name):
    change, exception, message = ERRORS[name]
    given = {**arguments(), **change}
    del given["out"]
    with pytest.raises(exception, match=rf"^int8_gemm: .*{message}"):
        farro.int8_gemm(**given)


def test_the_unchanged_arguments_are_legal():
    given = arguments()
    assert (farro.int8_gemm(**given) == K + 1).all()
    assert (given["out"] == K + 1).all()


@pytest.mark.parametrize("backend", ("triton", "cuda"))
@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
def test_a_back_end_that_cannot_run_says_why_and_never_falls_back(backend):
    given = arguments()
    message = rf"int8_gemm: backend='{backend}' cannot run this on cpu: .*Use backend='cpu'"
    with pytest.raises(farro.UnsupportedError, match=message):
        farro.int8_gemm(**given, backend=backend)
    assert (given["out"] == SENTINEL).all()


def test_an_error_is_not_remembered_as_legal():
    """What a call decided is cached by kind of call; a bad call of the same shapes still fails."""
    given = arguments()
    farro.int8_gemm(**given)
    given["out"].fill_(SENTINEL)
    for _ in range(2):
        with pytest.raises(ValueError, match="zero stride"):
            farro.int8_gemm(**{**given, "a": EXPANDED["a"]})
    assert (given["out"] == SENTINEL).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["a", "b", "scale_a", "scale_b", "bias"])
def test_out_may_not_share_memory_with_an_input(name, backend):
    """Checked on every call: addresses are no part of what is remembered."""
    k = 256
    memory = torch.zeros(4096, dtype=torch.int8)
    for offset in (0, 64, 512):
        given = {
            "a": torch.ones(M, k, dtype=torch.int8),
            "b": torch.ones(N, k, dtype=torch.int8).T,
            "scale_a": torch.ones(M, 1),
            "scale_b": torch.ones(1, N),
            "bias": torch.ones(N),
        }
        value = given[name]
        place = memory[: value.nbytes].view(value.dtype)
        view = place.view(k, N) if name == "b" else place.view(value.shape)
        given[name] = view.copy_(value)
        before = memory.clone()
        out = memory[offset : offset + 4 * M * N].view(torch.float32).view(M, N)
        call = dict(output_dtype=torch.float32, out=out, backend=backend)
        if offset < value.nbytes:
            message = f"int8_gemm: out shares memory with {name},.*{name}.clone"
            with pytest.raises(ValueError, match=message):
                farro.int8_gemm(**given, **call)
            assert torch.equal(memory, before)
        elif offset >= 512 and value.nbytes <= 512:
            assert (farro.int8_gemm(**given, **call) == k + 1).all()


def test_interleaved_columns_of_one_tensor_are_legal():
    memory = torch.zeros(M, N + 2)
    memory[:, N:] = 1
    given = dict(arguments(), scale_a=memory[:, N:], out=memory[:, :N])
    assert (farro.int8_gemm(**given, output_dtype=torch.float32) == K + 1).all()


def test_backward_refuses():
    given = arguments()
    del given["out"]
    given["scale_a"].requires_grad_()
    result = farro.int8_gemm(**given)
    with pytest.raises(RuntimeError, match="int8_gemm is for inference: it has no backward"):
        result.float().sum().backward()
