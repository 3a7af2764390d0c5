"""The one exception of farro's own; wrong types are TypeError and wrong values ValueError."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """A back end cannot run this problem here.

    The message names the operator, the reason of each back end that was asked, and a back end that
    would run, where there is one.
    """
