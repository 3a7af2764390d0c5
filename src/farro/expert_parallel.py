"""ExpertParallel: the experts of a layer split over processes, quantized rows exchanged.

    each rank   quantizes its tokens, sorts their routes by expert and so by rank
    all-to-all  how many rows each rank gets from each
    all-to-all  codes with their scales and expert ids (parallel_rows.py)
    each rank   computes its experts' BF16 rows, not yet weighted or summed
    all-to-all  these rows back to where they came from
    each rank   the weighted sum of each token's rows, in slot order

All that is rounded is rounded where one process would round it, so the results are its bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import distributed

from .checks import check_dtype, check_required, check_shape
from .nn import Int8Experts, SparseNVFP4Experts
from .ops.moe_route.plan import check_ids
from .parallel_rows import Int8Rows, NVFP4Rows, Rows, rounded

_NAME = "ExpertParallel"
_FAILED = -1  # in place of a number of rows: the sender raised
_ALIGN = 16  # bytes, of each row that travels
_KINDS: dict[type[torch.nn.Module], Callable[[Any], Rows]] = {
    Int8Experts: Int8Rows,
    SparseNVFP4Experts: NVFP4Rows,
}
_AGREED = 8  # numbers that ranks tell each other, of any kind of experts


class ExpertParallel(torch.nn.Module):
    """The experts of a layer, split over the ranks of a process group, as one layer.

    Every rank holds some experts and calls forward with its own tokens, any number of them; what
    comes out is what one module with all experts gives for these tokens in one process: in INT8 bit
    for bit, in NVFP4 as far as the back end's FP32 sums have one order, whatever the other tokens.
    Codes travel with their scales, once for each route; BF16 rows come back.

    Args:
        experts: this rank's experts, in the order of ranks: rank 0 has the first ids, and so on.
            Int8Experts, of which ranks may have different numbers, and none; or SparseNVFP4Experts,
            without a capacity, whose first_expert plays no part. `share` divides them evenly.
        group: the process group, or None for the default one. NCCL for experts on GPUs, gloo for
            a CPU.

    The constructor and forward are collective: every rank of the group calls them, in the same
    order. The host waits for the numbers of rows, so a call cannot be captured in a CUDA graph.

    Raises:
        RuntimeError: torch.distributed is not initialized; a rank failed or stalled. A rank whose
            arguments are wrong tells the others, which raise at once, and all may go on with the
            next call. One that ends, hangs or fails later ends the others within the group's
            timeout; then the group is of no more use. (With NCCL, whose collectives do not make
            the host wait, torch's watchdog ends the process; TORCH_NCCL_BLOCKING_WAIT=1 raises.)
        ValueError: ranks whose experts differ in kind, sizes, group_size, gscales or activation;
            a capacity.
    """

    def __init__(
        self,
        experts: Int8Experts | SparseNVFP4Experts,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        kind = next((kind for kind in _KINDS if isinstance(experts, kind)), None)
        if kind is None:
            given = type(experts).__name__
            raise TypeError(
                f"{_NAME}: experts must be a farro.nn.Int8Experts or a "
                f"farro.nn.SparseNVFP4Experts, got {given}"
            )
        if getattr(experts, "capacity", None) is not None:
            raise ValueError(
                f"{_NAME}: experts have a capacity; needed None, since no route may be dropped"
            )
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                f"{_NAME}: torch.distributed is not initialized: call "
                "torch.distributed.init_process_group first (torchrun sets what it needs)"
            )
        self.experts = experts
        self._rows = _KINDS[kind](experts)
        self.group = group
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        counts = self._agree()
        self.num_experts = sum(counts)
        self.first_expert = sum(counts[: self.rank])
        ends = torch.tensor(counts, device=self._device).cumsum(0)
        self.register_buffer("_ends", ends, persistent=False)

    _ends: torch.Tensor  # int64 [ranks]: the id after each rank's last

    @staticmethod
    def share(num_experts: int, rank: int, world_size: int) -> tuple[int, int]:
        """First id and the id after the last of a rank's even share of the experts."""
        return num_experts * rank // world_size, num_experts * (rank + 1) // world_size

    @classmethod
    def split(
        cls,
        experts: Int8Experts | SparseNVFP4Experts,
        group: distributed.ProcessGroup | None = None,
    ) -> ExpertParallel:
        """Of a module that has all experts on every rank: each rank keeps a copy of its share."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls(experts, group)  # raises
        rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
        if isinstance(experts, SparseNVFP4Experts) and experts.num_experts < world_size:
            raise ValueError(
                f"{_NAME}: {experts.num_experts} experts for {world_size} ranks; needed one a rank "
                "of SparseNVFP4Experts at least"
            )
        return cls(experts.select(*cls.share(experts.num_experts, rank, world_size)), group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Args:
            hidden_states: [T, H] in bfloat16, for INT8 also float16 or float32; T may differ
                between ranks.
            top_k_index: int32 or int64 [T, topk], ids of all ranks' experts; others are dropped.
            top_k_weights: [T, topk] of any floating dtype, taken as FP32; in NVFP4 None for 1.

        Returns:
            [T, H] in the dtype of hidden_states.
        """
        with torch.no_grad():
            try:
                sent = self._prepare(hidden_states, top_k_index, top_k_weights)
            except Exception:
                with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                    self._exchange_counts([_FAILED] * self.world_size)
                raise
            coming = self._exchange_counts(sent.counts)
            arrived = self._exchange("rows", sent.rows, sent.counts, coming, rounded(sum(coming)))
            y = self._compute(arrived, sum(coming))
            back = self._exchange("results", y.view(torch.uint8), coming, sent.counts)
            rows = back.view(torch.bfloat16)
            weights = None if top_k_weights is None else top_k_weights.to(torch.float32)
            return self._rows.summed(rows, sent.route_dest, weights, hidden_states.dtype)

    # --- what travels --------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.experts.buffers()).device

    @property
    def _places(self) -> tuple[list[slice], slice, int]:
        """Of a row's bytes: each part's, its expert's id's, and how long it is."""
        parts, end = [], 0
        for size in (*self._rows.sizes, 4):
            parts.append(slice(end, end + size))
            end = -(-(end + size) // 4) * 4
        return parts[:-1], parts[-1], -(-end // _ALIGN) * _ALIGN

    def _prepare(self, x: Any, ids: Any, weights: Any) -> _Sent:
        """Check, quantize, and sort the routes by expert."""
        check_required(_NAME, hidden_states=x, top_k_index=ids)
        self._rows.check(_NAME, weights)
        check_dtype(_NAME, "hidden_states", x, self._rows.dtypes)
        hidden = self.experts.hidden_size
        check_shape(_NAME, "hidden_states", x, (*x.shape[:1], hidden), "[T, H]")
        check_ids(_NAME, ids)
        check_shape(_NAME, "top_k_index", ids, (x.shape[0], *ids.shape[1:]), "[T, topk]")
        if weights is not None:
            check_shape(_NAME, "top_k_weights", weights, tuple(ids.shape), "[T, topk]")
        made = self._rows.quantized(x.contiguous())
        flat = ids.reshape(-1).long()
        kept = (flat >= 0) & (flat < self.num_experts)
        # dropped routes come last, and are not sent
        expert, order = torch.where(kept, flat, self.num_experts).sort(stable=True)
        ends = torch.searchsorted(expert, self._ends).tolist()  # the host waits
        counts = [end - start for start, end in zip([0, *ends], ends)]
        used = ends[-1]
        dest = torch.empty_like(order)
        dest[order] = torch.arange(order.numel(), device=order.device)
        dest = torch.where(kept, dest, -1).view(ids.shape).int()
        token = order[:used] // max(ids.shape[1], 1)
        places, id_place, length = self._places
        rows = torch.zeros(used, length, dtype=torch.uint8, device=x.device)
        for place, part in zip(places, made):
            rows[:, place] = part[token]
        rows[:, id_place].view(torch.int32).copy_(expert[:used, None])
        return _Sent(rows, counts, dest)

    def _compute(self, rows: torch.Tensor, used: int) -> torch.Tensor:
        """BF16 [used, H] of the rows that arrived."""
        places, id_place, _ = self._places
        rows[used:, id_place].view(torch.int32).fill_(-1)  # dropped routes
        if not used:
            shape = 0, self.experts.hidden_size
            return torch.empty(shape, dtype=torch.bfloat16, device=rows.device)
        ids = rows[:, id_place].view(torch.int32) - self.first_expert
        return self._rows.computed([rows[:, place] for place in places], ids)[:used]

    # --- collectives ---------------------------------------------------------------------------

    def _agree(self) -> list[int]:
        """How many experts each rank has; all have to be of one layer."""
        agreed = self._rows.agreed
        kind = [isinstance(self.experts, kind) for kind in _KINDS].index(True)
        values = [float(kind), *map(float, agreed.values())]
        values += [0.0] * (_AGREED - len(values))
        own = [float(self.experts.num_experts), *values]
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
        told = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._collective("sizes", distributed.all_gather, told, mine)
        every = [each.tolist() for each in told]
        for rank, (_, *theirs) in enumerate(every):
            if theirs != values:
                names = ", ".join(("kind", *agreed))
                have, need = (f"{v[: len(agreed) + 1]}" for v in (theirs, values))
                raise ValueError(
                    f"{_NAME}: experts of rank {rank} have ({names}) {have} and those of rank "
                    f"{self.rank} {need}; needed experts of one layer"
                )
        return [int(count) for count, *_ in every]

    def _exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """How many rows come from each rank, for how many go to each."""
        given = torch.tensor(counts, device=self._ends.device)
        taken = torch.empty_like(given)
        self._collective("numbers of rows", distributed.all_to_all_single, taken, given)
        coming: list[int] = taken.tolist()
        failed = [rank for rank, count in enumerate(coming) if count == _FAILED]
        if failed and counts[0] != _FAILED:
            ranks = ", ".join(map(str, failed))
            raise RuntimeError(
                f"{_NAME}: rank {ranks} failed before this call of rank {self.rank} could be "
                "computed; the error is told there"
            )
        return coming

    def _exchange(
        self, what: str, rows: torch.Tensor, counts: list[int], coming: list[int], room: int = 0
    ) -> torch.Tensor:
        """Rows [sum(counts), bytes] in the order of ranks -> those that come from each.

        There are `room` rows of memory at least; what comes fills the first of them.
        """
        used = sum(coming)
        taken = rows.new_empty(max(used, room), rows.shape[1])
        self._collective(what, distributed.all_to_all_single, taken[:used], rows, coming, counts)
        return taken

    def _collective(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            # without async_op torch gives no work to wait for, so TORCH_NCCL_BLOCKING_WAIT and
            # the group's timeout are not heeded
            call(*arguments, group=self.group, async_op=True).wait()
        except RuntimeError as error:
            self._lost(what, error)

    def _lost(self, what: str, error: RuntimeError) -> NoReturn:
        raise RuntimeError(
            f"{_NAME}: rank {self.rank} of {self.world_size} could not exchange {what}: another "
            "rank ended, failed, or did not come within the group's timeout, which "
            f"init_process_group sets ({str(error).splitlines()[0]})"
        ) from error

    def extra_repr(self) -> str:
        last = self.first_expert + self.experts.num_experts
        return (
            f"rank={self.rank} of {self.world_size}, "
            f"experts={self.first_expert} to {last} of {self.num_experts}"
        )


@dataclass(frozen=True)
class _Sent:
    """What one rank's tokens make: rows sorted by expert, how many to each rank, and the way back.

    `route_dest` int32 [T, topk] is the row of each route among them, -1 for a dropped one.
    """

    rows: torch.Tensor
    counts: list[int]
    route_dest: torch.Tensor
