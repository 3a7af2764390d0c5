"""What racecheck reported, of kernels with rings of mbarriers and of others, and whether it counts.

python racecheck_report.py RIGHT HASTY LOG...

RIGHT and HASTY are its logs of planted.py's right handoffs and of a hasty one. Where it reports
one that is right, or none that is hasty, its reports on rings tell nothing. Exits 1 where a kernel
without rings was reported, or one with a ring and handoffs were told apart.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "farro"
REPORT = re.compile(r"Race reported between \w+ access at (?:void )?(\w+)")
INCLUDE = re.compile(r'#include "(\S+)"')
KERNEL = re.compile(r"__global__[^;{]*?\b(\w+)\(const")


def ring_kernels(sources: Path = SOURCES) -> set[str]:
    """Names of kernels that use an mbarrier in their own files (all include its wrappers)."""
    found = set()
    for path in sources.rglob("*.cu"):
        text = path.read_text()
        beside = [path.parent / name for name in INCLUDE.findall(text)]
        files = [text, *(other.read_text() for other in beside if other.exists())]
        if any("mbarrier_" in each for each in files):
            found |= set(KERNEL.findall(text))
    for path in sources.rglob("triton_*.py"):
        text = path.read_text()
        if "mbarrier.wait" in text:
            found |= set(re.findall(r"^def (\w+)\(", text, re.MULTILINE))
    return found


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


def report(right: str, hasty: str, logs: str) -> tuple[str, bool]:
    """Lines to print, and whether something is at fault."""
    of_right, of_hasty = (Counter(REPORT.findall(text)) for text in (right, hasty))
    judges = bool(of_hasty) and not of_right
    verdict = (
        "it follows mbarriers" if judges else "what it reports of rings of mbarriers tells nothing"
    )
    names = ring_kernels()
    every = Counter(REPORT.findall(logs))
    rings = Counter({name: count for name, count in every.items() if name in names})
    others = every - rings
    lines = (
        f"handoffs   reported of right ones: {told(of_right)}; of hasty ones: {told(of_hasty)}: "
        f"{verdict}",
        f"racecheck  {rings.total()} reports of kernels with rings of mbarriers: {told(rings)}",
        f"racecheck  {others.total()} reports of other kernels: {told(others)}",
    )
    return "\n".join(lines), bool(others) or (judges and bool(rings))


def main() -> None:
    right, hasty, *logs = (Path(name).read_text(errors="replace") for name in sys.argv[1:])
    text, fault = report(right, hasty, "\n".join(logs))
    print(text)
    sys.exit(fault)


if __name__ == "__main__":
    main()
