"""group_mm and group_mm_ragged against rational arithmetic and float64; tactics; errors."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farro
from farro import nvfp4
from farro.catalogue import operator_named
from farro.testing import GroupCase, assert_bit_equal, group_mm_cases
from farro.testing.nvfp4_group_mm import activations_of, weight_of

from .exact_arithmetic import rounded

KERNELS = {k.backend: k for k in operator_named("nvfp4_group_mm").kernels}
BACKENDS = ("reference", "cpu")
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (1,), generator=generator))


def value(code: int) -> Fraction:
    return -E2M1[code - 8] if code > 7 else E2M1[code]


def scale(byte: int) -> Fraction:
    """UE4M3, subnormals too; 0x7f is not asked for."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> list[list[Fraction]]:
    """Rows of packed codes and their scales, as rational numbers."""
    rows = []
    for codes, bytes in zip(packed.tolist(), scales.tolist()):
        each = [code for byte in codes for code in (byte & 15, byte >> 4)]
        rows.append([value(code) * scale(bytes[k // 32]) for k, code in enumerate(each)])
    return rows


@pytest.mark.parametrize("values", ("normal", "wide"))
@pytest.mark.parametrize("coded", (True, False))
def test_the_reference_by_rational_arithmetic(coded, values, generator):
    """Dense codes are drawn here, so that nothing is shared but `compress`."""
    e, m, k, cap = 2, 32, 64, 3
    parts = weight_of(e, m, k, generator, values)
    packed, scales = nvfp4.decompress(*parts.values(), k)
    x = activations_of((e, cap), k, generator, values, coded)
    alphas = torch.tensor([0.3, 2.0**-7])
    counts = torch.tensor([2, 3], dtype=torch.int32)
    out = torch.full((e, cap, m), 7.0).bfloat16()
    nvfp4.group_mm(out, *parts.values(), *x.values(), alphas, counts, m, k, backend="reference")
    for expert in range(e):
        weight = decoded(packed[expert], scales[expert])
        if coded:
            rows = decoded(x["b_act"][expert], x["sfb"][expert])
        else:
            rows = [[Fraction(v) for v in row] for row in x["b_act"][expert].tolist()]
        alpha = Fraction(float(alphas[expert]))
        for t in range(int(counts[expert])):
            want = [
                rounded(alpha * sum(a * b for a, b in zip(rows[t], weight[n])), "bfloat16")
                for n in range(m)
            ]
            assert out[expert, t].double().tolist() == want
        assert (out[expert, int(counts[expert]) :] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", group_mm_cases(), ids=str)
def test_cases_on_a_cpu(case, backend, generator):
    """Against float64, within rounding; rows without a token hold NaN, and are not written."""
    outcome = case.build(seed=seed_of(generator)).check(KERNELS[backend])
    assert outcome.status == "ok", outcome.detail


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 5),
    m=st.integers(0, 6).map(lambda n: 32 * n),
    k=st.integers(0, 9).map(lambda n: 32 * n),
    cap=st.integers(0, 40),
    ragged=st.booleans(),
    coded=st.booleans(),
    counts=st.sampled_from(("random", "full", "none", "one", "wild")),
    seed=st.integers(0, 2**31),
)
def test_anything_on_a_cpu(experts, m, k, cap, ragged, coded, counts, seed):
    case = GroupCase("drawn", experts, m, k, cap, ragged, coded, counts)
    outcome = case.build(seed=seed).check(KERNELS["cpu"])
    assert outcome.status == "ok", outcome.detail


def test_a_wrong_product_is_found(generator):
    """One code, one scale, one count too many: the cases above would fail."""
    call = GroupCase("wrong", experts=2, cap=12, counts="full").build(seed=seed_of(generator))
    good = call.arguments
    (expected,) = call.expected
    for name, change in (("b_act", 1), ("sfb", 1), ("a_comp", 1)):
        tensor = good[name].clone()
        tensor.view(-1)[tensor.numel() // 2] ^= change
        function = call.function
        result = function(**{**good, name: tensor, "out": None}, backend="reference")
        assert call.differs(0, result, expected) is not None, name
    fewer = {**good, "expert_num_tokens": good["expert_num_tokens"] - 1, "out": None}
    assert call.differs(0, call.function(**fewer, backend="reference"), expected) is not None


@pytest.mark.parametrize("coded", (True, False))
def test_a_row_does_not_depend_on_the_number_of_rows(coded, generator):
    """Padded, on the CPU: other tokens come and go, the first ones keep their bits."""
    e, m, k, cap = 2, 96, 288, 70
    parts = weight_of(e, m, k, generator)
    x = activations_of((e, cap), k, generator, "normal", coded)
    alphas = torch.rand(e, generator=generator)
    results = []
    for count in (70, 1, 2, 31, 33, 64):
        counts = torch.tensor([count, cap - count], dtype=torch.int32)
        out = torch.zeros(e, cap, m).bfloat16()
        nvfp4.group_mm(out, *parts.values(), *x.values(), alphas, counts, m, k, backend="cpu")
        results.append((count, out))
    for count, out in results:
        assert_bit_equal(out[0, :count], results[0][1][0, :count])


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_non_finite_activations_stay_in_their_row(value, generator):
    e, m, k, cap = 2, 64, 96, 6
    parts = weight_of(e, m, k, generator)
    x = activations_of((e, cap), k, generator, "normal", False)
    counts = torch.full((e,), cap, dtype=torch.int32)
    given = (torch.ones(e), counts, m, k)
    for backend in BACKENDS:
        want = nvfp4.group_mm(
            torch.empty(e, cap, m).bfloat16(), *parts.values(), *x.values(), *given, backend=backend
        )
        bad = x["b_act"].clone()
        bad[1, 2, 40] = value
        out = torch.empty(e, cap, m).bfloat16()
        nvfp4.group_mm(out, *parts.values(), bad, None, *given, backend=backend)
        assert not out[1, 2].isfinite().all()
        out[1, 2] = want[1, 2]
        assert_bit_equal(out, want)


# --- tactics -------------------------------------------------------------------------------------


def test_the_table_of_tactics():
    names, tactics = nvfp4.group_mm_configs(), nvfp4.all_tactics()
    assert names[0] == "auto" and len(set(names)) == len(names)
    assert tactics[0] == nvfp4.DEFAULT_TACTIC == (0, 1, 1)
    assert len(set(tactics)) == len(tactics)
    for config_id, *cluster in tactics:
        assert tuple(cluster) in nvfp4.valid_clusters(names[config_id])
    assert {config_id for config_id, _, _ in tactics} == set(range(len(names)))
    for max_n in (0, 1, 16, 17, 64, 100, 8192):
        assert nvfp4.suggest_tactic(max_n) in tactics
    assert names[nvfp4.suggest_tactic(9)[0]] == "64x16"
    assert names[nvfp4.suggest_tactic(65)[0]] == "128x128"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: nvfp4.valid_clusters("64x7"),
            ValueError,
            "no tactic is named '64x7'; known: auto",
        ),
        (lambda: nvfp4.valid_clusters(3), TypeError, "name must be a str, got int"),
        (lambda: nvfp4.suggest_tactic(-1), ValueError, "max_n is -1; needed 0 or more"),
        (lambda: nvfp4.suggest_tactic(8.0), TypeError, "max_n must be an int, got float"),
    ],
)
def test_wrong_questions_about_tactics(call, error, message):
    with pytest.raises(error, match=message):
        call()


def short_call(generator, k=128):
    parts = weight_of(2, 64, k, generator)
    x = activations_of((2, 5), k, generator, "normal", True)
    out = torch.full((2, 5, 64), 7.0).bfloat16()
    counts = torch.full((2,), 5, dtype=torch.int32)
    return out, (*parts.values(), *x.values(), torch.ones(2), counts, 64, k)


@pytest.mark.parametrize("backend", ("auto", *BACKENDS))
def test_a_tactic_that_cannot_run_writes_nothing(backend, generator):
    out, given = short_call(generator)
    split = nvfp4.group_mm_configs().index("64x16_split2")
    for tactic, reason in (
        ((split, 1, 1), "splits K in 2, and K = 128 has 1 tiles of 128"),
        ((1, 2, 1), r"has clusters \(1, 1\), not \(2, 1\)"),
        ((0, 0, 0), r"has clusters \(1, 1\), not \(0, 0\)"),
    ):
        with pytest.raises(farro.UnsupportedError, match=reason):
            nvfp4.group_mm(out, *given, *tactic, backend=backend)
        assert (out == 7).all()
    long_out, long_given = short_call(generator, k=256)
    nvfp4.group_mm(long_out, *long_given, split, backend=backend)
    assert not (long_out == 7).any()


def test_every_tactic_gives_the_result_or_is_skipped(generator):
    """What an autotuner does, on any machine."""
    out, given = short_call(generator, k=512)
    want = nvfp4.group_mm(out.clone(), *given)
    ran = 0
    for tactic in nvfp4.all_tactics():
        try:
            result = nvfp4.group_mm(out.clone(), *given, *tactic)
        except farro.UnsupportedError:
            continue
        ran += 1
        torch.testing.assert_close(result, want, rtol=2**-7, atol=1e-3)
    assert ran


def test_a_gpu_never_falls_back_to_the_reference_for_a_tactic(generator):
    """Asked for tiles that no kernel has, "auto" raises instead of taking seconds."""
    out, given = (
        [t.to("meta") if isinstance(t, torch.Tensor) else t for t in part]
        for part in ([short_call(generator)[0]], short_call(generator)[1])
    )
    told = farro.explain(nvfp4.group_mm, *out, *given, config_id=1, arch="sm_80")
    assert told.chosen is None
    assert {row.kernel: row.verdict for row in told.rows}["nvfp4_group_mm.reference"] == (
        "it has no tactics, and '64x8' was asked for"
    )
    assert farro.explain(nvfp4.group_mm, *out, *given, arch="sm_80").chosen is not None


# --- errors --------------------------------------------------------------------------------------


def test_errors_name_what_is_wrong(generator):
    out, given = short_call(generator)
    a_comp, e_meta, sfa, b_act, sfb, alphas, counts, m, k = given
    cases = {
        "scales are missing": ((a_comp, e_meta, sfa, b_act, None), TypeError, "sfb must be a tens"),
        "e_meta and sfa exchanged": (
            (a_comp, sfa, e_meta, b_act, sfb),
            ValueError,
            r"e_meta has shape \[2, 64, 4\]; needed \[2, 64, 8\]",
        ),
        "not contiguous": (
            (a_comp, e_meta, sfa, b_act.transpose(0, 1).contiguous().transpose(0, 1), sfb),
            ValueError,
            r"b_act has strides .* pass b_act.contiguous\(\)",
        ),
        "E4M3 scales": (
            (a_comp, e_meta, sfa, b_act, sfb.view(torch.float8_e4m3fn)),
            TypeError,
            r"sfb has dtype float8_e4m3fn; needed uint8: pass sfb.view\(torch.uint8\)",
        ),
    }
    for operands, error, message in cases.values():
        with pytest.raises(error, match=f"^group_mm: {message}"):
            nvfp4.group_mm(out, *operands, alphas, counts, m, k)
    with pytest.raises(ValueError, match=r"group_mm: out has shape .*\[E, max_n, M\]"):
        nvfp4.group_mm(out[:, :4], *given)
    brain = torch.zeros(2 * 5 * 128 + 64).bfloat16()
    with pytest.raises(ValueError, match="out shares memory with b_act"):
        nvfp4.group_mm(
            brain[: 2 * 5 * 64].view(2, 5, 64),
            *(a_comp, e_meta, sfa, brain[: 2 * 5 * 128].view(2, 5, 128), None),
            *(alphas, counts, m, k),
        )
    assert (out == 7).all()
    many = [torch.zeros(4097, 0, n, dtype=torch.uint8) for n in (32, 8, 4)]
    with pytest.raises(ValueError, match="a_comp has 4097 experts; needed 1 to 4096"):
        nvfp4.group_mm(
            torch.empty(4097, 1, 0).bfloat16(),
            *many,
            *(torch.zeros(4097, 1, n, dtype=torch.uint8) for n in (64, 4)),
            *(torch.ones(4097), torch.zeros(4097, dtype=torch.int32), 0, 128),
        )


def test_a_weight_saved_and_loaded_gives_the_same(tmp_path, generator):
    """The compressed tensors are plain bytes, the same on every device."""
    out, given = short_call(generator, k=256)
    want = nvfp4.group_mm(out.clone(), *given)
    torch.save(given[:3], tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert_bit_equal(nvfp4.group_mm(out.clone(), *loaded, *given[3:]), want)


def test_quick_cases_cover_both_layouts_and_formats():
    quick = [c for c in group_mm_cases() if c.quick]
    assert {(c.ragged, c.coded) for c in quick} == {(a, b) for a in (0, 1) for b in (0, 1)}
    names = [c.name for c in group_mm_cases()]
    assert len(set(names)) == len(names)
