"""The Triton fp8_linear in the interpreter, with FP32 outputs: it truncates what becomes BF16.

Both ways of multiplying: codes decoded to FP16, as below SM89, and FP8 operands. The interpreter
reads the NaN codes of FP8 operands as 480, so these are left to the decoded way and to a GPU.
"""

from __future__ import annotations

import pytest
import torch

from farro.arch import interpreting
from farro.catalogue import operator_named
from farro.ops.fp8_linear import triton
from farro.ops.fp8_linear.checks import over_rows
from farro.ops.fp8_linear.triton_configs import Config, refuses
from farro.testing import assert_bit_equal, exact_linear, far_from_exact, linear_cases

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="run by run_again"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, on Inf * 0
]
KERNEL = next(k for k in operator_named("fp8_linear").kernels if k.backend == "triton")
# the largest cases belong to a GPU
CASES = [c for c in linear_cases() if c.m * c.n > 0 and c.m * c.n * c.k <= 3_000_000]

# family, swap, block_m, block_n, block_k, promote, group_m, warps, stages
FORCED = [
    Config("pointers", False, 32, 32, 128, 0, 8, 4, 3),
    Config("pointers", False, 16, 64, 64, 128, 4, 2, 2),
    Config("pointers", True, 64, 16, 128, 512, 8, 4, 4),
    Config("pointers", True, 32, 64, 256, 256, 16, 4, 3),
    Config("descriptors", False, 64, 32, 128, 256, 8, 4, 3),
    Config("descriptors", True, 64, 16, 128, 0, 8, 4, 3),
    Config("descriptors", True, 16, 32, 64, 256, 8, 2, 2),
]


def forced(config: Config, given: dict, epilogue: str, out=None, decode=None) -> torch.Tensor:
    """What `config` writes over a poisoned output, which is FP32."""
    m, n = given["input"].shape[0], given["weight"].shape[0]
    out = torch.full((m, n), float("nan")) if out is None else out
    names = ("input", "weight", "alpha", "bias")
    tensors = [given.get(name) for name in names]
    tensors += [over_rows(given.get("residual"), m), out]
    call = triton.prepare(config, *tensors, epilogue, False, decode=decode)
    call.kernel[call.grid](*call.args(*tensors), **call.options)
    return out


@pytest.mark.parametrize("decode", (False, True), ids=("fp8", "decoded"))
@pytest.mark.parametrize("config", FORCED, ids=lambda c: c.name)
def test_every_family_is_close_to_the_exact_result(config, decode, generator):
    if decode and config.family != "pointers":
        pytest.skip("who has the copy engine has FP8")
    # 19 rows and 35 columns leave tails in every tile, 592 a tail in K
    for k in (592, 512, 16):
        x, weight = (torch.randn(r, k, generator=generator) for r in (19, 35))
        given = {
            "input": x.to(torch.float8_e4m3fn),
            "weight": weight.to(torch.float8_e4m3fn),
            "alpha": 0.25,
            "bias": torch.randn(35, generator=generator),
            "residual": torch.randn(19, 35, generator=generator).bfloat16(),
        }
        for epilogue in ("bias_residual", "bias_gelu"):
            if epilogue == "bias_gelu":
                del given["residual"]
            out = forced(config, given, epilogue, decode=decode)
            exact, magnitude = exact_linear(given, epilogue)
            assert far_from_exact(out, exact, magnitude, 2.0**-18) is None, (k, epilogue)


@pytest.mark.parametrize("config", [c for c in FORCED if c.family == "pointers"], ids=str)
def test_every_code_is_decoded(config):
    """A sum of one product each: all codes times one, NaN too."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    one = torch.ones(3, 1).to(torch.float8_e4m3fn)
    for x, weight in ((every, one), (one, every)):
        given = {"input": x, "weight": weight, "alpha": 1.0}
        want = x.double() @ weight.double().T
        assert_bit_equal(forced(config, given, "none", decode=True) + 0.0, want.float() + 0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, generator):
    call = case.build(seed=int(torch.randint(2**31, (1,), generator=generator)))
    config = KERNEL.config(call.problem)
    assert refuses(config, call.problem) is None
    before = {name: place.view.clone() for name, place in call.inputs.items() if place is not None}
    out = forced(config, call.arguments, str(call.problem.param("epilogue")))
    found = far_from_exact(out, call.expected[0], call._exact[1], 2.0**-17)
    assert found is None, found
    for name, value in before.items():
        assert_bit_equal(call.inputs[name].view, value, name)


def test_in_place_and_strided_outputs(generator):
    x, weight = (torch.randn(s, 300, generator=generator).to(torch.float8_e4m3fn) for s in (9, 20))
    bias = torch.randn(20, generator=generator)
    for config in FORCED[:4]:
        space = torch.randn(36, 40, generator=generator)
        out = space[::4, 1::2]
        before = space.clone()
        given = {"input": x, "weight": weight, "alpha": 2.0, "bias": bias, "residual": out.clone()}
        exact, magnitude = exact_linear(given, "bias_residual")
        forced(config, {**given, "residual": out}, "bias_residual", out=out)
        assert far_from_exact(out, exact, magnitude, 2.0**-18) is None
        out.copy_(before[::4, 1::2])
        assert_bit_equal(space, before)  # nothing else was written


def test_an_empty_sum_leaves_the_epilogue():
    x, weight = torch.empty(3, 0).to(torch.float8_e4m3fn), torch.empty(5, 0).to(torch.float8_e4m3fn)
    given = {"input": x, "weight": weight, "alpha": 7.0, "bias": torch.arange(5.0)}
    want = torch.arange(5.0).expand(3, 5)
    assert_bit_equal(forced(FORCED[0], given, "bias"), want.contiguous())


def test_alpha_varies_from_call_to_call(generator):
    """One launcher serves all numbers, and a tensor another; none of them keeps an earlier one."""
    x, weight = (torch.randn(s, 64, generator=generator).to(torch.float8_e4m3fn) for s in (5, 20))
    out = torch.empty(5, 20)
    base = forced(FORCED[0], {"input": x, "weight": weight, "alpha": 1.0}, "none")
    for alpha in (1.0, -2.0, 0.5, torch.tensor(4.0), torch.tensor([0.25])):
        triton.run(FORCED[0], x, weight, alpha, None, None, out, "none", False)
        assert_bit_equal(out, base * float(alpha))
