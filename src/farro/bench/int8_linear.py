"""Int8Linear in the benchmark: its product on the weight as the module keeps it, and its forward.

On a CPU the module keeps its weight group-packed, so its product is faster than int8_gemm's on a
plain weight; both are timed, against torch's BF16 matmul of the same values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..nn import Int8Linear
from ..ops.int8_gemm import int8_gemm
from . import int8_gemm as gemm
from . import peers
from .case import Adapter, Case, Missing, Options, Sizes, Subject


@functools.lru_cache(maxsize=1)
def _module(n: int, k: int, group_size: int, device: torch.device) -> Int8Linear:
    codes, scale_b = gemm.weights(n, k, group_size, device)
    module = Int8Linear(k, n, bias=False, group_size=group_size, device=device)
    module.load_state_dict({"weight": codes, "weight_scale": scale_b.T.contiguous()})
    return module


def build(sizes: Sizes, options: Options) -> Case:
    n, k = sizes["n"], sizes["k"]
    group_size, device = options.group_size, options.device
    plain = gemm.build(sizes, options)
    module = _module(n, k, group_size, device)
    a, weight, scale_a, scale_b = plain.args
    x = peers.exact(a, scale_a, group_size, options.dtype)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        result: torch.Tensor = module(x)
        return result

    def ways() -> Iterator[Subject | Missing]:
        if device.type == "cpu":
            yield Subject(
                *("farro auto, plain weight", "farro"),
                lambda: int8_gemm(a, weight, scale_a, scale_b, **plain.kwargs),
                note="weight [N,K], not the module's packing",
            )
        yield Subject(
            *("Int8Linear forward", "farro", forward),
            truth=lambda: peers.product64(x, gemm._weight64(n, k, group_size, device)),
            note="quantizes its input too; the error holds that",
        )

    return Case(
        sizes=plain.sizes,
        options=options,
        ops=plain.ops,
        nbytes=plain.nbytes,
        function=int8_gemm,
        args=(a, module._codes.transpose(-1, -2), scale_a, scale_b),
        kwargs=plain.kwargs,
        truth=plain.truth,
        peers=plain.peers,
        extra=ways,
    )


ADAPTER = Adapter(
    "int8_linear",
    build,
    gemm.SHAPES,
    gemm.ROWS,
    group_sizes=(32, 64, 128, 256),
    ceiling=gemm.ceiling,
    ceiling_ops=gemm.ADAPTER.ceiling_ops,
    summary="Int8Linear's product with activations already quantized, and its whole forward",
)
