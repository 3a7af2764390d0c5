"""Gates of -80 and below in fp8_swiglu_quantize: exp(-gate) nears and passes FP32's largest.

silu is then tiny, not zero, and an up projection of some 2^120 brings it back among the codes. So
a quotient by more than 2^126, which a GPU's fast division gives as 0, would show.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farro.formats.fp8 import E4M3, blocks
from farro.ops.fp8_swiglu_quantize import reference

_GATES = ((80, 0), (80, 4), (80, 6), (80, 7), (80, 7.5), (88, 0), (88, 0.5), (88, 2), (88, 3))
_N, _K = 256, 16


def far_gates(device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """input, gate_up_weight and their scales; all sums are exact."""
    x, weight = torch.zeros(len(_GATES), _K), torch.zeros(2 * _N, _K)
    x[:, :2], x[:, 2:4] = -torch.tensor(_GATES), 1
    weight[:_N, :2], weight[:_N, 2] = 1, -0.25 * (torch.arange(_N) % 4)
    weight[_N:, 3] = 1 + torch.arange(_N) % 3
    scale = torch.ones(2 * blocks(_N), 1)
    scale[blocks(_N) :] = 2.0**120
    given = (x.to(E4M3), weight.to(E4M3), torch.ones(len(_GATES), 1), scale)
    return tuple(t.to(device) for t in given)


def check_far_gates(run: Callable[..., None], device: torch.device | str) -> None:
    """run(x, weight, input_scale, weight_scale, q, scale) near the reference: exp may be coarse."""
    given = far_gates(device)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.full((len(_GATES), _N), 0x55, dtype=torch.uint8, device=device).view(E4M3)
        return q, torch.full((len(_GATES), blocks(_N)), torch.nan, device=device)

    (q, scale), (wanted_q, wanted_scale) = outputs(), outputs()
    run(*given, q, scale)
    reference.run(None, *given, wanted_q, wanted_scale)
    torch.testing.assert_close(scale, wanted_scale, rtol=2.0**-4, atol=0)
    of_columns = torch.arange(_N) // 128
    got, want = (
        a.double() * b.double()[:, of_columns] for a, b in ((q, scale), (wanted_q, wanted_scale))
    )
    assert (want != 0).all()
    assert ((got - want).abs() <= want.abs() / 8).all(), (got / want).amin(1)
