"""`python -m farro` is `farro`."""

from __future__ import annotations

from .cli import main

main()
