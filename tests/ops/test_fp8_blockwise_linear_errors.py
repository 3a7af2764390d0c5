"""Every error of fp8_blockwise_linear_bf16: its type, its message, `out` not written."""

from __future__ import annotations

import pytest
import torch

import farro
from farro.arch import interpreting

NAME = "fp8_blockwise_linear_bf16"
M, N, K = 4, 200, 300
SENTINEL = 42.0
E4M3 = torch.float8_e4m3fn


def fp8(*shape):
    return torch.ones(shape).to(E4M3)


def arguments():
    return {
        "input": fp8(M, K),
        "weight": fp8(N, K),
        "input_scale": torch.ones(M, 3),
        "weight_scale": torch.ones(2, 3),
        "bias": torch.ones(N),
        "out": torch.full((M, N), SENTINEL, dtype=torch.bfloat16),
    }


# changed arguments, exception, what its message says
ERRORS = {
    "input missing": ({"input": None}, TypeError, "input must be a tensor, got NoneType"),
    "weight a list": ({"weight": [[1]]}, TypeError, "weight must be a tensor, got list"),
    "input_scale missing": ({"input_scale": None}, TypeError, "input_scale must be a tensor"),
    "weight_scale missing": ({"weight_scale": None}, TypeError, "weight_scale must be a tensor"),
    "weight_scale a number": ({"weight_scale": 1.0}, TypeError, "must be a tensor, got float"),
    "bias a number": ({"bias": 1.0}, TypeError, "bias must be a tensor, got float"),
    "out a list": ({"out": []}, TypeError, "out must be a tensor, got list"),
    "input bfloat16": (
        {"input": torch.ones(M, K, dtype=torch.bfloat16)},
        TypeError,
        "input has dtype bfloat16; needed float8_e4m3fn: quantize_fp8_1x128 makes E4M3 codes",
    ),
    "input e5m2": (
        {"input": torch.ones(M, K).to(torch.float8_e5m2)},
        TypeError,
        "input has dtype float8_e5m2; needed float8_e4m3fn",
    ),
    "weight bytes": (
        {"weight": fp8(N, K).view(torch.uint8)},
        TypeError,
        "weight has dtype uint8; needed float8_e4m3fn: quantize_fp8_128x128 makes E4M3 codes",
    ),
    "weight fnuz": (
        {"weight": torch.ones(N, K).to(torch.float8_e4m3fnuz)},
        TypeError,
        "weight has dtype float8_e4m3fnuz",
    ),
    "input_scale bfloat16": (
        {"input_scale": torch.ones(M, 3, dtype=torch.bfloat16)},
        TypeError,
        r"input_scale has dtype bfloat16; needed float32: pass input_scale.float\(\)",
    ),
    "weight_scale e8m0": (
        {"weight_scale": torch.ones(2, 3).to(torch.float8_e8m0fnu)},
        TypeError,
        "weight_scale has dtype float8_e8m0fnu; needed float32",
    ),
    "weight_scale bytes of e8m0": (
        {"weight_scale": torch.ones(2, 3, dtype=torch.uint8)},
        TypeError,
        "weight_scale has dtype uint8; needed float32",
    ),
    "bias float16": (
        {"bias": torch.ones(N, dtype=torch.float16)},
        TypeError,
        "bias has dtype float16; needed bfloat16 or float32",
    ),
    "out float32": (
        {"out": torch.full((M, N), SENTINEL)},
        TypeError,
        "out has dtype float32; needed bfloat16",
    ),
    "activation a flag": (
        {"activation": True},
        TypeError,
        "activation must be a str or None, got bool; needed None or 'gelu_tanh'",
    ),
    "activation unknown": (
        {"activation": "gelu"},
        ValueError,
        "activation is 'gelu'; needed None or 'gelu_tanh'",
    ),
    "backend not a name": ({"backend": 1}, TypeError, "backend must be a str, got int"),
    "backend unknown": ({"backend": "gpu"}, ValueError, "backend is 'gpu'; needed one of auto"),
    "input one-dimensional": (
        {"input": fp8(K)},
        ValueError,
        r"input has shape \[300\]; needed \[M,K\]: flatten leading dimensions with input.reshape",
    ),
    "input three-dimensional": ({"input": fp8(2, M, K)}, ValueError, r"\[2, 4, 300\]; needed"),
    "weight of another K": (
        {"weight": fp8(N, K + 1)},
        ValueError,
        r"weight has shape \[200, 301\]; needed \[N,K\] with K = 300 of input$",
    ),
    "weight transposed": (
        {"weight": fp8(K, N)},
        ValueError,
        r"needed \[N,K\] with K = 300 of input: pass weight.T of a matrix \[K,N\]",
    ),
    "input_scale a row's": (
        {"input_scale": torch.ones(M, 1)},
        ValueError,
        r"input_scale has shape \[4, 1\]; needed \[4, 3\], that is \[M, ceil\(K/128\)\]",
    ),
    "input_scale transposed": ({"input_scale": torch.ones(3, M)}, ValueError, r"\[3, 4\]; needed"),
    "input_scale of a tensor": ({"input_scale": torch.ones(())}, ValueError, r"shape \[\]; needed"),
    "weight_scale of groups": (
        {"weight_scale": torch.ones(N, 3)},
        ValueError,
        r"weight_scale has shape \[200, 3\]; needed \[2, 3\], that is \[ceil\(N/128\), ceil\(K/128",
    ),
    "bias of another N": ({"bias": torch.ones(N + 1)}, ValueError, r"\[201\]; needed \[200\]"),
    "bias of one row": ({"bias": torch.ones(1, N)}, ValueError, r"bias has shape \[1, 200\]"),
    "out of another shape": (
        {"out": torch.full((N, M), SENTINEL, dtype=torch.bfloat16)},
        ValueError,
        r"out has shape \[200, 4\]; needed \[4, 200\], that is \[M,N\]",
    ),
    "out overlapping": (
        {"out": torch.full((300,), SENTINEL, dtype=torch.bfloat16).as_strided((M, N), (9, 1))},
        ValueError,
        r"out has strides \[9, 1\] for shape \[4, 200\], so its elements overlap",
    ),
    "out elsewhere": (
        {"out": torch.empty(M, N, dtype=torch.bfloat16, device="meta")},
        ValueError,
        "out is on meta and input on cpu; all tensors must be on one device",
    ),
    "weight_scale elsewhere": (
        {"weight_scale": torch.ones(2, 3, device="meta")},
        ValueError,
        "weight_scale is on meta and input on cpu",
    ),
}
EXPANDED = {
    "input": fp8(1, K).expand(M, K),
    "weight": fp8(1, K).expand(N, K),
    "input_scale": torch.ones(M, 1).expand(M, 3),
    "weight_scale": torch.ones(1, 1).expand(2, 3),
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


@pytest.mark.parametrize("change, exception, message", ERRORS.values(), ids=ERRORS)
def test_a_wrong_argument_is_named_and_nothing_is_written(change, exception, message):
    given = {**arguments(), **change}
    with pytest.raises(exception, match=rf"^{NAME}: .*{message}"):
        farro.fp8_blockwise_linear_bf16(**given)
    out = given.pop("out")
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert (out == SENTINEL).all()
    if "out" not in change:
        with pytest.raises(exception, match=rf"^{NAME}: .*{message}"):
            farro.fp8_blockwise_linear_bf16(**given)


def test_the_unchanged_arguments_are_legal():
    given = arguments()
    assert (farro.fp8_blockwise_linear_bf16(**given) == 300).all()  # 301 is no BF16 number
    assert (given["out"] == 300).all()


@pytest.mark.parametrize("backend", ("triton", "cuda"))
@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
def test_a_back_end_that_cannot_run_says_why_and_never_falls_back(backend):
    given = arguments()
    message = rf"fp8_blockwise_linear: backend='{backend}' cannot run this on cpu: .*"
    with pytest.raises(farro.UnsupportedError, match=message):
        farro.fp8_blockwise_linear_bf16(**given, backend=backend)
    assert (given["out"] == SENTINEL).all()


@pytest.mark.parametrize("name", ["input", "weight", "input_scale", "weight_scale", "bias"])
def test_out_may_not_share_memory_with_an_input(name):
    """Checked on every call: addresses are no part of what is remembered."""
    memory = torch.zeros(N * K * 2, dtype=torch.uint8)
    given = arguments()
    value = given[name]
    place = memory[: value.nbytes].view(value.dtype).view(value.shape)
    given[name] = place.copy_(value)
    before = memory.clone()
    for offset in (0, value.nbytes // 64 * 64):
        out = memory[offset : offset + 2 * M * N].view(torch.bfloat16).view(M, N)
        message = f"{NAME}: out shares memory with {name},.*{name}.clone"
        if offset < value.nbytes:
            with pytest.raises(ValueError, match=message):
                farro.fp8_blockwise_linear_bf16(**{**given, "out": out})
            assert torch.equal(memory, before)
    clear = memory[-2 * M * N :].view(torch.bfloat16).view(M, N)
    assert (farro.fp8_blockwise_linear_bf16(**{**given, "out": clear}) == 300).all()


def test_an_error_is_not_remembered_as_legal():
    given = arguments()
    farro.fp8_blockwise_linear_bf16(**given)
    given["out"].fill_(SENTINEL)
    for _ in range(2):
        with pytest.raises(ValueError, match="zero stride"):
            farro.fp8_blockwise_linear_bf16(**{**given, "input": EXPANDED["input"]})
    assert (given["out"] == SENTINEL).all()


def test_backward_refuses():
    given = arguments()
    del given["out"]
    given["bias"].requires_grad_()
    result = farro.fp8_blockwise_linear_bf16(**given)
    with pytest.raises(RuntimeError, match="fp8_blockwise_linear is for inference: it has no"):
        result.float().sum().backward()
