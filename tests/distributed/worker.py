"""One rank of tests/distributed, in a process of its own: runs some scenarios in order."""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from farro.moe import ExpertParallel
from farro.nn import Int8Experts, SparseNVFP4Experts

H, INNER, G, EXPERTS = 70, 40, 32, 7


def told(error: Exception, *words: str) -> None:
    for word in words:
        assert word in str(error), f"{word!r} is not in {error}"


def raised(kind: type[Exception], call, *words: str) -> Exception:
    try:
        call()
    except kind as error:
        told(error, *words)
        return error
    raise AssertionError(f"no {kind.__name__}")


def grid(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Numbers of E2M1, half of them zero, with a 6 in each 16: a block's scale is then 1."""
    values = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 1.0, -1.0, -2.0])
    x = values[torch.randint(len(values), shape, generator=random)]
    blocks = x.view(*shape[:-1], -1, 16)
    blocks[..., 4:8] = 0.0  # the pairs that sparsity drops
    blocks[..., 12:] = 0.0
    blocks[..., 0] = 6.0
    return x


class Rank:
    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.gpu = device.startswith("cuda")
        # of a group that loses a rank; NCCL makes its communicators within it
        self.patience = timedelta(seconds=10 if self.gpu else 2)
        random = torch.Generator().manual_seed(5)  # the same layer on every rank
        weights = [
            torch.randn(shape, generator=random) * shape[-1] ** -0.5
            for shape in ((EXPERTS, 2 * INNER, H), (EXPERTS, H, INNER))
        ]
        self.whole = Int8Experts.from_dense(*weights, G).to(device)
        self.random = torch.Generator().manual_seed(100 + rank)

    def tokens(self, count: int, topk: int = 3, dtype=torch.float32):
        x = torch.randn(count, H, generator=self.random).to(dtype)
        ids = torch.randint(-1, EXPERTS + 1, (count, topk), generator=self.random)
        given = x, ids, torch.rand(count, topk, generator=self.random)
        return tuple(tensor.to(self.device) for tensor in given)

    def parts(self, bounds: list[int]) -> ExpertParallel:
        mine = self.whole.select(bounds[self.rank], bounds[self.rank + 1])
        return ExpertParallel(mine)

    def check(self, layer: ExpertParallel, given) -> None:
        got, want = layer(*given), self.whole(*given)
        assert got.dtype == want.dtype and torch.equal(got, want), f"rank {self.rank}"

    # --- scenarios ---------------------------------------------------------------------------

    def even(self) -> None:
        layer = ExpertParallel.split(self.whole)
        assert layer.num_experts == EXPERTS and f"rank={self.rank} of {self.world}" in str(layer)
        for count, dtype in ((9, torch.float32), (1, torch.bfloat16), (40, torch.float16)):
            self.check(layer, self.tokens(count, dtype=dtype))
        x, ids, weights = self.tokens(5)
        self.check(layer, (x, ids.int(), weights.double()))

    def uneven(self) -> None:
        """Ranks without experts, without tokens, without routes; all routes to one rank."""
        bounds = [0, *[2] * (self.world - 1), EXPERTS]
        layer = self.parts(bounds)
        self.check(layer, self.tokens(0 if self.rank == 0 else 3 + self.rank))
        self.check(layer, self.tokens(0))
        x, ids, weights = self.tokens(6)
        self.check(layer, (x, torch.full_like(ids, EXPERTS), weights))
        self.check(layer, (x, torch.full_like(ids, 1), weights))
        self.check(layer, (x, ids[:, :0], weights[:, :0]))

    def nvfp4(self) -> None:
        """Rows in NVFP4: with the reference the bits of one process, else its values nearly."""
        h, inner = 64, 32
        random = torch.Generator().manual_seed(6)
        weights = [
            torch.randn(shape, generator=random) * shape[-1] ** -0.5
            for shape in ((EXPERTS, 2 * inner, h), (EXPERTS, h, inner))
        ]
        whole = SparseNVFP4Experts.from_dense(*weights, input_gscale=700.0, middle_gscale=900.0)
        whole = whole.to(self.device)
        self.nvfp4_calls(whole, "reference")
        self.nvfp4_calls(whole, "auto")
        other = SparseNVFP4Experts(1, h, inner)
        other.input_gscale.fill_(1.0 + self.rank)
        call = functools.partial(ExpertParallel, other.to(self.device))
        raised(ValueError, call, "input_gscale", "one layer")
        few = whole.select(0, 1)
        raised(ValueError, lambda: ExpertParallel.split(few), "one a rank")
        mixed = other if self.rank else Int8Experts(1, h, inner, 32)
        raised(ValueError, lambda: ExpertParallel(mixed.to(self.device)), "kind", "one layer")

    def nvfp4_exact(self) -> None:
        """Sums that all orders give alike: the bits of one process, whatever the back end.

        Weights and tokens are codes whose scales are powers of two; what lies between is rounded
        from the same bits.
        """
        h, inner = 64, 32
        random = torch.Generator().manual_seed(7)
        weights = [grid(shape, random) for shape in ((EXPERTS, 2 * inner, h), (EXPERTS, h, inner))]
        whole = SparseNVFP4Experts.from_dense(*weights, input_gscale=1.0, middle_gscale=0.125)
        whole = whole.to(self.device)
        even, uneven = ExpertParallel.split(whole), self.share_of(whole)
        for layer, count in ((even, 9), (even, 200), (uneven, 3 + self.rank)):
            x = grid((count, h), self.random).bfloat16().to(self.device)
            _, ids, weights = self.tokens(count)
            for chosen in (ids, torch.full_like(ids, 1), ids.clamp(0, 2)):
                got, want = layer(x, chosen, weights), whole(x, chosen, weights)
                assert want.isfinite().all() and want.float().norm() > 0
                assert torch.equal(got, want), f"rank {self.rank}, {count} tokens"
        none = torch.empty(0, h, dtype=torch.bfloat16, device=self.device)
        counts = (none, ids[:0], weights[:0]) if self.rank == 0 else (x, ids, weights)
        assert torch.equal(even(*counts), whole(*counts))  # a rank without tokens

    def share_of(self, whole: SparseNVFP4Experts) -> ExpertParallel:
        """The last rank has all experts but one each of the others."""
        last = EXPERTS if self.rank == self.world - 1 else self.rank + 1
        return ExpertParallel(whole.select(self.rank, last))

    def nvfp4_calls(self, whole: SparseNVFP4Experts, backend: str) -> None:
        whole.backend = backend
        layer = ExpertParallel.split(whole)
        assert layer.experts.backend == backend

        def check(x, ids, weights) -> None:
            got, want = layer(x, ids, weights), whole(x, ids, weights)
            assert got.dtype == want.dtype and got.shape == want.shape
            off = (got.double() - want.double()).norm()
            exact = backend == "reference"
            assert off == 0 if exact else off <= 1e-2 * want.double().norm(), (backend, float(off))

        for count in (9, 0 if self.rank else 5):
            x, ids, weights = self.tokens(count, dtype=torch.bfloat16)
            x = torch.randn(count, 64, generator=self.random).bfloat16().to(self.device)
            check(x, ids, weights)
        check(x, ids.int(), None)
        check(x, torch.full_like(ids, EXPERTS), weights)  # no route is kept
        check(x, torch.full_like(ids, 1), weights)

    def argument(self) -> None:
        """One rank's wrong argument ends this call on all, at once, and not the next one."""
        layer = ExpertParallel.split(self.whole)
        x, ids, weights = self.tokens(4)
        start = time.monotonic()
        if self.rank == 1:
            raised(ValueError, lambda: layer(x[:, 1:], ids, weights), "[4, 69]", "needed")
        else:
            raised(RuntimeError, lambda: layer(x, ids, weights), "rank 1 failed", f"{self.rank}")
        assert time.monotonic() - start < 30  # not the group's timeout
        self.check(layer, (x, ids, weights))

    def mismatch(self) -> None:
        experts = Int8Experts(1, H, INNER if self.rank else INNER + 1, G).to(self.device)
        raised(ValueError, lambda: ExpertParallel(experts), f"{INNER + 1}")

    def short_of_patience(self) -> distributed.ProcessGroup | None:
        """Gloo sees at once that a process is gone, NCCL waits for its timeout."""
        return distributed.new_group(timeout=self.patience) if self.gpu else None

    def dies(self) -> None:
        """Rank 1 ends in the middle of a call, after it has received its rows."""
        layer = ExpertParallel.split(self.whole, self.short_of_patience())
        given = self.tokens(4)
        self.check(layer, given)
        if self.rank == 1:
            layer._compute = lambda rows, used: os._exit(0)  # type: ignore[method-assign]
        start = time.monotonic()
        raised(RuntimeError, lambda: layer(*given), "could not exchange", "another rank ended")
        assert time.monotonic() - start < 30

    def stalls(self) -> None:
        """Rank 1 never comes: the others end within their group's timeout."""
        layer = ExpertParallel.split(self.whole, distributed.new_group(timeout=self.patience))
        given = self.tokens(4)
        self.check(layer, given)
        if self.rank == 1:
            time.sleep(3 * self.patience.total_seconds())
            os._exit(0)
        words = (f"rank {self.rank}", "did not come within the group's timeout")
        start = time.monotonic()
        error = raised(RuntimeError, lambda: layer(*given), *words)
        assert time.monotonic() - start < 2.5 * self.patience.total_seconds()
        told(error.__cause__, "timing out" if self.gpu else "Timed out")

    def watchdog(self) -> None:
        """Rank 1 never comes, and the host does not wait for NCCL: its watchdog ends the others."""
        layer = ExpertParallel.split(self.whole, distributed.new_group(timeout=self.patience))
        given = self.tokens(4)
        self.check(layer, given)
        if self.rank == 1:
            time.sleep(2 * self.patience.total_seconds())
            os._exit(0)
        layer(*given)
        torch.cuda.synchronize()
        raise AssertionError("went on without rank 1")

    def fails(self) -> None:
        """Rank 1's experts raise in the middle of a call: its own error there, a lost rank here."""
        layer = ExpertParallel.split(self.whole, self.short_of_patience())
        given = self.tokens(4)
        self.check(layer, given)
        start = time.monotonic()
        if self.rank == 1:
            layer._compute = lambda rows, used: {}["out of memory"]  # type: ignore[method-assign]
            raised(KeyError, lambda: layer(*given), "out of memory")
        else:
            raised(RuntimeError, lambda: layer(*given), "could not exchange", "another rank")
        assert time.monotonic() - start < 30


def run(backend: str, rank: int, world: int, store: Path, scenarios: list[str], file: Path) -> None:
    """What is printed goes to a file."""
    with file.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        if "watchdog" not in scenarios:  # a lost rank raises, as with gloo
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    try:
        ExpertParallel(Int8Experts(1, 32, 32, 32))
    except RuntimeError as error:
        told(error, "init_process_group")
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    mine = Rank(rank, world, device)
    for name in scenarios:
        getattr(mine, name)()
        print("ok", name, flush=True)
    os._exit(0)  # a group that lost a rank does not end in order
