"""Check that every relative link of the Markdown files leads to a file. Usage: check_links.py"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent


def links(text: str) -> list[str]:
    """Targets of links and images, in order."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or []:
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append(str(target))
    return found


def broken(path: Path) -> list[str]:
    local = [t.partition("#")[0] for t in links(path.read_text()) if "://" not in t]
    return [t for t in local if t and not (path.parent / t).exists()]


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = [ROOT / name for name in listed.stdout.split()]
    faults = [f"{path.relative_to(ROOT)}: {target}" for path in files for target in broken(path)]
    print(
        "\n".join(f"broken link in {fault}" for fault in faults) or f"{len(files)} files: links ok"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
