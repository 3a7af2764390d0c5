"""group_mm_swiglu_quant: the bytes of group_mm and silu_mul_quant_act, on each back end."""

from __future__ import annotations

import pytest
import torch

from farro import nvfp4
from farro.catalogue import operator_named
from farro.testing import assert_bit_equal, fused_cases
from farro.testing.nvfp4_group_mm import activations_of, weight_of

OPERATOR = operator_named("nvfp4_group_mm_swiglu_quant")
KERNELS = {k.backend: k for k in OPERATOR.kernels}
BACKENDS = ("reference", "cpu")


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", fused_cases(), ids=str)
def test_the_bytes_of_two_calls(case, backend, generator):
    outcome = case.build(seed=seed_of(generator)).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail


@pytest.mark.gpu
@pytest.mark.parametrize("case", fused_cases(), ids=str)
def test_the_bytes_of_two_calls_on_a_gpu(case, generator):
    call = case.build("cuda", seed_of(generator))
    for kernel in OPERATOR.kernels:
        if kernel.backend not in ("cpu", "reference"):
            outcome = call.check(kernel)
            assert outcome.status in ("ok", "refused"), f"{kernel.name}: {outcome.detail}"
            assert outcome.status == "ok" or kernel.backend != "triton"


def test_a_wrong_byte_is_found(generator):
    call = next(c for c in fused_cases() if c.name == "counts full").build(seed=seed_of(generator))
    codes, scales = (t.clone() for t in call.expected)
    assert call.differs(0, codes, call.expected[0]) is None
    codes[1, 2, 3] ^= 1
    scales[1, 2, 1] ^= 1
    assert call.differs(0, codes, call.expected[0]) is not None
    assert call.differs(1, scales, call.expected[1]) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_interleaved_rows_give_the_same_bytes(backend, generator):
    """The weight's rows reordered at load time, and told so."""
    e, n, k, cap = 2, 96, 128, 5
    parts = weight_of(e, 2 * n, k, generator)
    packed, scales = nvfp4.decompress(*parts.values(), k)
    order = nvfp4.interleave_gate_up_rows(n)
    other = nvfp4.compress(packed[:, order], scales[:, order], k)
    x = activations_of((e, cap), k, generator, "normal", True)
    counts = torch.tensor([5, 3], dtype=torch.int32)
    rest = (*x.values(), torch.rand(e, generator=generator), counts, torch.ones(1), 2 * n, k)
    codes, scale = nvfp4.group_mm_swiglu_quant(*parts.values(), *rest, backend=backend)
    again = nvfp4.group_mm_swiglu_quant(*other, *rest, interleaved=True, backend=backend)
    assert codes.shape == (e, cap, n // 2) and scale.shape == (e, cap, n // 32)
    for expert, count in enumerate(counts.tolist()):
        assert_bit_equal(again[0][expert, :count], codes[expert, :count])
    assert_bit_equal(again[1], scale)
    assert (scale[1, 3:] == 0x38).all() and not (scale[1, :3] == 0x38).all()


def test_the_two_products_of_a_layer(generator):
    """Gate and up, the activation, and down, near the same in float64 on dequantized weights."""
    e, hidden, inner, cap = 2, 128, 64, 6
    gate_up = weight_of(e, 2 * inner, hidden, generator)
    down = weight_of(e, hidden, inner, generator)
    x = torch.randn(e, cap, hidden, generator=generator).bfloat16()
    counts = torch.full((e,), cap, dtype=torch.int32)
    one, gscale = torch.full((e,), 0.05), torch.full((e,), 4.0)
    codes, scales = nvfp4.group_mm_swiglu_quant(
        *gate_up.values(), x, None, one, counts, gscale, 2 * inner, hidden
    )
    out = torch.empty(e, cap, hidden).bfloat16()
    nvfp4.group_mm(out, *down.values(), codes, scales, one / gscale, counts, hidden, inner)

    def dense(parts, k):
        packed, own = nvfp4.decompress(*parts.values(), k)
        return nvfp4.dequantize_weight(packed, own).double() * 0.05

    both = x.double() @ dense(gate_up, hidden).mT
    middle = torch.nn.functional.silu(both[..., :inner]) * both[..., inner:]
    want = middle @ dense(down, inner).mT
    assert (out.double() - want).norm() < 0.15 * want.norm()  # 4 bits in between


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"features": 96}, ValueError, "features is 96, .* needed a multiple of 64"),
        ({"gscale": torch.ones(3)}, ValueError, r"gscale has shape \[3\]; needed \[2\] or \[1\]"),
        ({"gscale": None}, TypeError, "gscale must be a tensor, got NoneType"),
        ({"activation": "gelu"}, ValueError, "activation is 'gelu'; needed 'silu' or 'situ'"),
    ],
)
def test_errors(change, error, message, generator):
    m = change.get("features", 128)
    given = {
        **weight_of(2, m, 64, generator),
        **activations_of((2, 3), 64, generator, "normal", True),
        "alphas": torch.ones(2),
        "expert_num_tokens": torch.ones(2, dtype=torch.int32),
        "gscale": torch.ones(2),
        "features": m,
        "k": 64,
    }
    with pytest.raises(error, match=f"^group_mm_swiglu_quant: {message}"):
        nvfp4.group_mm_swiglu_quant(**{**given, **change})
