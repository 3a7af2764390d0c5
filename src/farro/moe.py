"""The parts of a mixture of experts under one name, whatever its number format."""

from __future__ import annotations

from .expert_parallel import ExpertParallel
from .ops.moe_ffn import moe_ffn
from .ops.moe_route import check_routing, dispatch_plan, dispatch_plan_ragged, moe_finalize

__all__ = [
    "ExpertParallel",
    "check_routing",
    "dispatch_plan",
    "dispatch_plan_ragged",
    "moe_ffn",
    "moe_finalize",
]
