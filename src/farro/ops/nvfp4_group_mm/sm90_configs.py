"""nvfp4_group_mm on SM90a: which problems and configurations the kernels take, and the choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...problem import Problem
from ...tuning import nearest, table, takes
from .tactics import illegal, rows_of, tactic_of, variant_of

SHARED_LIMIT = 232448  # bytes a CTA may use on SM90
_SHARED_OF_SM = 233472  # of which each CTA costs 1 KiB more than it uses
_ALIGNMENT = 1024  # of shared memory, for the 128-byte swizzle
_TILE = 2816  # bytes of 64 rows x 128 of K, as in sm90_tiles.cuh
_PITCH = 144  # bytes of one token's sums on their way to the gated activation
FEW = (8, 16, 32)  # tokens of a tile whose weights' bytes bound it
_WIDTHS = (*FEW, 64, 128, 256)  # that the heuristic chooses among
# Tiles whose activations may be expanded in the product, and by a launch before it
_EXPAND = {True: (8, 16, 32, 64), False: (64, 128, 192, 256)}
_CONSUMERS = {
    8: 6,
    16: 6,
    32: 5,
    64: 4,
    128: 4,
    192: 3,
    256: 2,
}  # the most that have registers for them
_TALLEST = {128: 3, 256: 2}  # that the heuristic takes, of 4 otherwise
_SPLITS = (1, 2, 4)
_MOST_STAGES = 12
_LONGEST = 2**31 - 2**10  # a row's index plus a tile stays an int


@dataclass(frozen=True)
class Config:
    """A tile of 64 * consumers weight rows by up to `tokens`; K in stages of step * 128."""

    consumers: int  # warpgroups that multiply
    tokens: int
    step: int
    stages: int
    inside: bool  # activations become 16-bit operands in the product, not by a launch before it
    ctas: int = 1  # a multiprocessor
    split: int = 1  # CTAs that share K
    raster: int = 8  # token tiles that are visited together
    pair: int = 1  # CTAs of neighbouring rows that bring their activations for one another

    @property
    def few(self) -> int:
        """Rows of the smaller of two boxes of activations."""
        return max(self.tokens // 4, 8) if self.tokens > 32 else 8

    @property
    def units(self) -> tuple[int, int]:
        """Units of the operand's ring, and halves of 128 of K in each."""
        count = {64: 6 if self.ctas == 1 else 4, 192: 6, 256: 6}.get(self.tokens, 8)
        return count, 1 if self.tokens >= 128 else 2

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and weight rows."""
        return self.tokens, self.rows

    @property
    def name(self) -> str:
        split = f", K in {self.split}" if self.split > 1 else ""
        pair = ", in pairs" if self.pair > 1 else ""
        return f"sm90 {self.rows}x{self.tokens}{split}{pair}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def shared_bytes(config: Config, experts: int, bf16: bool = True, gated: bool = False) -> int:
    """What the kernel's Traits add up to, with room to align; BF16 takes more than codes."""
    c = config
    units, part = c.units
    stage = c.step * c.consumers * _TILE + 16
    if c.inside:
        stage += 4 * c.tokens * 128 if bf16 else c.tokens * (128 + 4 * c.step)
    sums = c.rows * c.tokens * 4 if c.split > 1 else 0
    operand = units * (part * c.tokens * 128 + 16)
    staging = c.consumers * (16 if c.tokens == 192 else min(c.tokens, 32)) * _PITCH if gated else 0
    return c.stages * stage + operand + sums + staging + 4 * (3 * experts + 1) + _ALIGNMENT


def registers(config: Config) -> int:
    """Of a thread that multiplies, as the kernel's Traits have them."""
    c = config
    launched = min(65536 // (128 * (c.consumers + 1) * c.ctas) // 8 * 8, 240)
    if c.tokens < 64:
        return launched
    given = 64 if c.inside else 32 if c.ctas > 1 or c.consumers > 2 else 40
    return min((launched * (c.consumers + 1) - given) // c.consumers // 8 * 8, 240)


def _needed(config: Config) -> int:
    """Registers that sums, an operand and addresses take; with fewer ptxas serializes."""
    return config.tokens // 2 + (64 if config.tokens < 64 else 60 if config.tokens == 64 else 48)


def refuses(config: Config, experts: int = 1, bf16: bool = True, gated: bool = False) -> str | None:
    """Why the kernels do not have this configuration, or None."""
    c = config
    sizes = (c.consumers, c.tokens, c.step, c.stages, c.ctas, c.split, c.raster, c.pair)
    if any(type(size) is not int or size < 1 for size in sizes):
        return "sizes are positive ints"
    if type(c.inside) is not bool:
        return "inside is a bool"
    if c.consumers > _CONSUMERS.get(c.tokens, 0) or c.raster > 64:
        return "no such tile"
    steps = (1,) if c.tokens > 64 else (2,) if c.inside else (1, 2)
    if c.tokens not in _EXPAND[c.inside] or c.step not in steps:
        return "activations of no such tile are expanded there"
    if not 3 <= c.stages <= 16 or c.split not in _SPLITS or c.ctas > 2:
        return "no such ring, split of K or number of CTAs"
    if c.split > 1 and not (c.inside and c.tokens <= 32 and c.ctas == 1 and c.consumers <= 4):
        return "K is split for few tokens, by CTAs with a multiprocessor and registers enough"
    if c.pair > 2 or (c.pair > 1 and (c.inside or c.tokens < 128 or c.ctas > 1)):
        return "pairs bring activations of wide tiles that were expanded before"
    if registers(c) < _needed(c):
        return f"{registers(c)} registers a thread, of {_needed(c)}"
    need = shared_bytes(c, experts, bf16, gated)
    if need > min(SHARED_LIMIT, _SHARED_OF_SM // c.ctas - 1024):
        return f"{need} bytes of shared memory for each of {c.ctas} CTAs"
    return None


def deepest(config: Config, experts: int, bf16: bool = True, gated: bool = False) -> Config | None:
    """With as many stages as there is room for."""
    for stages in range(_MOST_STAGES, 2, -1):
        deep = replace(config, stages=stages)
        if refuses(deep, experts, bf16, gated) is None:
            return deep
    return None


def configs(experts: int, bf16: bool = True, gated: bool = False) -> Iterator[Config]:
    """Every tile with the deepest ring; tactics, tuner and tests choose among them."""
    for inside, widths in _EXPAND.items():
        for tokens in widths:
            for consumers in range(1, _CONSUMERS[tokens] + 1):
                for step, ctas, split in itertools.product((2, 1), (1, 2), _SPLITS):
                    c = Config(consumers, tokens, step, 3, inside, ctas, split)
                    deep = deepest(c, experts, bf16, gated)
                    if deep is not None:
                        yield deep


def heuristic(problem: Problem) -> Config:
    """The narrowest tile that holds an expert's tokens; the tallest that leaves enough tiles."""
    experts, m, quarter = problem.spec("a_comp").shape
    tactic, tokens = tactic_of(problem), rows_of(problem)
    processors = problem.arch.multiprocessors
    width = tactic.tokens or next((w for w in _WIDTHS if w >= tokens), _WIDTHS[-1])
    bf16 = problem["sfb"] is None

    def tiles(consumers: int) -> int:
        return experts * -(-m // (64 * consumers)) * -(-max(tokens, 1) // width)

    consumers = tactic.rows // 64 if tactic.tokens else _TALLEST.get(width, 4)
    split = tactic.split_k if tactic.tokens else 1
    if not tactic.tokens:
        # codes that a launch before it expands: faster than tiles of 32 or within 4 %,
        # and 20 % faster where an expert has more rows than expected; measured with many tiles
        if width == 32 and not bf16 and tiles(4) >= 3 * processors:
            width = 64
        while width in FEW and consumers > 1 and tiles(consumers) * 4 < processors * 3:
            consumers //= 2
        while width in FEW and split < 4 and tiles(consumers) * split * 2 <= processors:
            if quarter * 4 < 512 * split * 2:
                break
            split *= 2
    for tokens in (width, max(width // 2, 8)):  # the tables of thousands of experts take room
        inside, most = tokens in FEW, min(consumers, _CONSUMERS[tokens])
        for step in (2, 1):
            deep = deepest(Config(most, tokens, step, 3, inside, split=split), experts, bf16)
            if deep is not None:
                return deep
    raise AssertionError(f"no room for the tables of {experts} experts")


def config(problem: Problem) -> Config:
    """The tuned table's configuration for the nearest problem, else the heuristic's."""
    experts, m, quarter = problem.spec("a_comp").shape
    guess, bf16 = heuristic(problem), problem["sfb"] is None
    if tactic_of(problem).tokens:
        return guess

    def reason(c: Config) -> str | None:
        # the width goes by the rows, which problems nearby in other sizes need not have
        if c.tokens != guess.tokens and min(c.tokens, guess.tokens) < 128:
            return "its tiles are for other numbers of rows"
        return refuses(c, experts, bf16)

    rows = table("nvfp4_group_mm", problem.arch.device)
    sizes = {"m": rows_of(problem), "e": experts, "n": m, "k": quarter * 4}
    for variant in dict.fromkeys((variant_of(problem), "w4a16" if bf16 else "w4a4")):
        exact = {"backend": "cuda", "variant": variant}
        found = nearest(rows, exact, sizes, takes(Config, reason))
        if found is not None:
            return Config(**found)
    return guess


def candidates(problem: Problem) -> list[Config]:
    """Those that a tuner may time."""
    experts, tokens = problem.spec("a_comp").shape[0], rows_of(problem)
    tactic = tactic_of(problem)
    if tactic.tokens:
        return [heuristic(problem)]

    found = configs(experts, problem["sfb"] is None)
    return [c for c in found if plausible(c, tokens)]


def plausible(config: Config, tokens: int) -> bool:
    """Whether a tile is worth timing for experts of so many tokens."""
    c = config
    return c.tokens >= min(tokens, 128) and (c.tokens <= 2 * tokens or c.tokens == 8)


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None: operands that bulk copies can read."""
    reason = illegal(problem)
    if reason is not None:
        return reason
    tactic = tactic_of(problem)
    experts, m, _ = problem.spec("a_comp").shape
    if tactic.tokens and heuristic(problem).tile != (tactic.tokens, tactic.rows):
        return f"tactic {tactic.name!r} leaves no room for the tables of {experts} experts"
    rows = problem.spec("out").shape[-2]
    for name in ("a_comp", "e_meta", "sfa", "b_act"):
        if problem.spec(name).align < 16:
            return f"{name} must begin at a multiple of 16 bytes: pass {name}.clone()"
    padded = len(problem.spec("out").shape) == 3
    if rows * (experts if padded else 1) > _LONGEST:
        return f"more than {_LONGEST} rows"
    if experts * (rows // 8 + 1) * (m // 64 + 1) > 2**31 - 1:
        return "more than 2147483647 tiles"
    return None


def must_run(problem: Problem) -> bool:
    """Every size, layout and kind of activation, at addresses that are multiples of 16."""
    if tactic_of(problem).tokens or illegal(problem) is not None:
        return False
    return why_not(problem) is None or all(
        problem.spec(name).align >= 16 for name in ("a_comp", "e_meta", "sfa", "b_act")
    )
