"""The grouped products of moe_ffn by themselves, each beside Humming's: rows are sorted already.

farro's first product has its activation and its quantizer in it, as moe_ffn has; Humming's has
neither. What is read is what a product reads within the layer, in memory that the one before wrote.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..arch import interpreting
from ..dispatch import Choice, select
from ..errors import UnsupportedError
from ..formats.int8_group import group_count
from . import peers
from .case import Missing, Options, Subject
from .quantized_layer_peers import Layer, humming_experts

GATE_UP, DOWN = "gate_up alone", "down alone"


def products(case: Any, inputs: Any) -> Iterator[Subject | Missing]:
    """farro's, of a case of moe_ffn and its Inputs; nothing where there are no rows, or no GPU."""
    if not (inputs.ids < inputs.experts).any():
        return
    if inputs.options.device.type != "cuda" and not interpreting():
        return
    operator, problem = case.problem()
    for backend, make in (("cuda", _native_calls), ("triton", _triton_calls)):
        try:
            choice = select(operator, problem, backend)
        except UnsupportedError as error:
            yield Missing(f"farro {backend}, {GATE_UP}", str(error))
            continue
        yield from _products(choice, inputs, make(choice.config, inputs))


@dataclass(frozen=True)
class _Calls:
    """Both products as calls, and what they read and write."""

    gate_up: Callable[[], None]
    down: Callable[[], None]
    offsets: torch.Tensor
    token: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    y: torch.Tensor


def _triton_calls(config: Any, inputs: Any) -> _Calls:
    from ..ops.moe_ffn.triton import Layer as Launches

    x, of_x, w_up, s_up, w_down, s_down, ids, _ = inputs.args
    group_size, routes = inputs.gate_up.group_size, ids.numel()
    (experts, inner, hidden), device = w_down.shape, x.device
    launches = Launches(config)
    offsets, _, token, _ = launches.routed(ids, experts)
    codes = torch.empty(routes, inner, dtype=torch.int8, device=device)
    scale = torch.empty(routes, group_count(inner, group_size), device=device)
    y = torch.empty(routes, hidden, dtype=torch.bfloat16, device=device)

    def gate_up() -> None:
        rows = (x, of_x, w_up, s_up, offsets, token)
        launches.gate_up(*rows, codes, scale, group_size, False)

    def down() -> None:
        launches.down(codes, scale, w_down, s_down, offsets, y, group_size)

    return _Calls(gate_up, down, offsets, token, codes, scale, y)


def _native_calls(config: Any, inputs: Any) -> _Calls:
    from ..ops.moe_ffn.sm90_launches import Scratch, launches

    x, w_down, ids = inputs.args[0], inputs.args[4], inputs.args[6]
    (experts, inner, hidden), group_size = w_down.shape, inputs.gate_up.group_size
    scratch = Scratch(ids.numel(), experts, hidden, inner, group_size)
    memory = torch.empty(scratch.bytes, dtype=torch.uint8, device=x.device)
    out = torch.empty(len(x), hidden, dtype=inputs.options.dtype, device=x.device)
    plan, *first, down, _ = launches(
        config, inputs.args, out, scratch, memory.data_ptr(), group_size, False
    )
    plan.on_current_stream()
    names = ("offsets", "source", "codes", "scale", "y")
    offsets, token, codes, scale, y = (scratch.part(memory, name) for name in names)

    def gate_up() -> None:  # with the launch that brings rows together, where there is one
        for launch in first:
            launch.on_current_stream()

    return _Calls(gate_up, down.on_current_stream, offsets, token, codes[:, :inner], scale, y)


def _products(choice: Choice, inputs: Any, calls: _Calls) -> Iterator[Subject]:
    x, of_x, group_size = inputs.codes, inputs.scale, inputs.gate_up.group_size
    codes, scale, token, used = calls.codes, calls.scale, calls.token, int(calls.offsets[-1])

    def gate_up() -> tuple[torch.Tensor, torch.Tensor]:
        calls.gate_up()
        return codes, scale

    def down() -> torch.Tensor:
        calls.down()
        return calls.y

    def restored(made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return peers.exact(made[0][:used], made[1][:used], group_size)

    gate_up()  # what down reads
    owners = _owners(calls.offsets)

    def hidden_truth() -> torch.Tensor:
        values = peers.exact(x, of_x, group_size)
        gate, up = _grouped(values[token[:used].long()], owners, inputs.gate_up.dense).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    truths: tuple[Callable[[], torch.Tensor], ...] = (
        hidden_truth,
        lambda: _grouped(restored((codes, scale)), owners, inputs.down.dense),
    )
    for name, call, value, truth in (
        (GATE_UP, gate_up, restored, truths[0]),
        (DOWN, down, lambda rows: rows[:used], truths[1]),
    ):
        yield Subject(
            *(f"farro {choice.kernel.backend}, {name}", "farro", call, value),
            truth=functools.cache(truth),
            backend=choice.kernel.backend,
            kernel=choice.kernel.name,
            config=str(choice.config),
            note="rows are sorted already",
        )


def _owners(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, its first row, the row after its last) of those that have any."""
    ends: list[int] = offsets.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(ends)) if b > a]


def _grouped(
    rows: torch.Tensor,
    owners: list[tuple[int, int, int]],
    dense: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """float64 rows times their experts' weights."""
    return torch.cat([rows[a:b].double() @ dense(e).double().T for e, a, b in owners])


def peer_products(layer: Layer, options: Options) -> Iterator[Subject | Missing]:
    """Humming's INT8 products, of rows that are gathered and quantized beforehand."""
    if options.device.type != "cuda" or not peers.wanted(options, "humming"):
        return
    label = f"Humming INT8 G{options.group_size}"
    try:
        calls = _humming(options.group_size, layer)
        for call, _ in calls.values():
            call()
    except ModuleNotFoundError as error:
        yield Missing(f"{label}, {GATE_UP}", f"{error.name} is not installed")
        return
    except Exception as error:  # an older library, or a shape that it does not take
        yield Missing(f"{label}, {GATE_UP}", f"{type(error).__name__}: {error}"[:200])
        return
    for name, (call, truth) in calls.items():
        note = "rows are sorted already; neither activation nor quantizer"
        yield Subject(f"{label}, {name}", "peer", call, truth=functools.cache(truth), note=note)


Made = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]  # the call, and its truth


def _humming(group_size: int, layer: Layer) -> dict[str, Made]:
    from humming.forward import may_quant_input

    gate_up, down = layer.experts()
    ends = torch.tensor([0, *layer.counts], device=layer.x.device).cumsum(0)
    owners = _owners(ends)
    made: dict[str, Made] = {}
    rows = layer.x[layer.token]
    for name, weight, experts in zip(
        (GATE_UP, DOWN), (gate_up, down), humming_experts(group_size, layer)
    ):
        codes, scale = may_quant_input(experts.humming_config, rows)
        how = {"gemm_type": "grouped_contiguous"}
        call = functools.partial(
            experts, codes, input_scale=scale, expert_layout=ends, compute_config=how
        )
        made[name] = call, functools.partial(_grouped, rows, owners, weight.__getitem__)
        gate, up = call().chunk(2, -1)
        rows = (torch.nn.functional.silu(gate.float()) * up.float()).to(rows.dtype)
    return made
