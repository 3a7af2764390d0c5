"""Figures of results of `farro bench`: what was reached, what is needed, what is aimed at.

python benchmarks/figures.py RESULT.json...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from farro.bench import adapter, figures

for name in sys.argv[1:]:
    result = json.loads(Path(name).read_text())
    judged = figures.judge(adapter(result["operator"]).figures, result["rows"])
    partly = bool(result["settings"].get("stopped_early"))
    print(name, *figures.lines(judged, partly), sep="\n")
