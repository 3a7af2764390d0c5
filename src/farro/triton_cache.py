"""Triton's cache on disk as farro's kernels use it: checked, compiled once, never in the way.

Triton trusts what it finds there. While farro compiles, Triton keeps and reads its files through a
manager that stores their digests with them: a truncated, foreign or missing file counts as not
compiled. Of processes that need one kernel, one compiles and the others wait for it. Where nothing
can be written, a directory of this process serves. Files lie where TRITON_CACHE_DIR says, else in
`triton` of FARRO_CACHE_DIR, else in Triton's own place. A manager of the user's own is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_S = 120.0  # for another process to compile; after that both do
_GUARD = threading.Lock()
_users = 0  # threads inside checked_cache
_held = threading.local()  # .managers: those of this thread that hold a lock


@contextlib.contextmanager
def checked_cache() -> Iterator[None]:
    """What Triton compiles inside goes through the manager below."""
    global _users
    from triton import knobs

    with _GUARD:
        ours = _users > 0 or knobs.cache.manager_class is None
        if ours:
            if _users == 0:
                knobs.cache.manager_class = _manager()
            _users += 1
    try:
        yield
    finally:
        for manager in _held.__dict__.pop("managers", ()):  # where compiling raised
            manager.release()
        if ours:
            with _GUARD:
                _users -= 1
                if _users == 0:
                    del knobs.cache.manager_class


def directory() -> Path:
    """Where compiled Triton kernels of farro are kept."""
    from triton import knobs

    usual = knobs.cache.get_triton_dir("cache")
    given, own = knobs.cache.dir or usual, os.environ.get("FARRO_CACHE_DIR")
    return Path(own) / "triton" if own and given == usual else Path(given)


@functools.lru_cache(maxsize=1)
def _temporary(process: int) -> str:
    """A directory of this process; a forked one makes its own."""
    import atexit
    import tempfile

    made = tempfile.mkdtemp(prefix="farro-triton-")

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


@functools.lru_cache(maxsize=64)
def _warn(place: str, error: str) -> None:
    warnings.warn(
        f"farro: Triton's cache {place} cannot be written ({error}); kernels are compiled again in "
        "each process. TRITON_CACHE_DIR or FARRO_CACHE_DIR names another directory",
        RuntimeWarning,
        stacklevel=2,
    )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.lru_cache(maxsize=1)
def _manager() -> type[Any]:
    """Made when first needed: importing farro does not import Triton."""
    from triton.runtime.cache import FileCacheManager

    class Checked(FileCacheManager):  # type: ignore[misc]
        """Of one kernel's files, or of one that Triton compiles for its launches."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.plain = override or dump  # debugging, in directories that the user names
            if self.plain:
                super().__init__(key, override=override, dump=dump)
                return
            self.key = key
            self.digests: dict[str, str] = {}
            self.lock: Any = None
            self._move(directory())

        def _move(self, place: Path) -> None:
            self.cache_dir = str(place / self.key)
            self.lock_path = str(place / self.key / "lock")
            try:
                os.makedirs(self.cache_dir, exist_ok=True)
            except OSError as error:
                if not os.path.isdir(self.cache_dir):
                    self._leave(error)

        def _leave(self, error: OSError) -> None:
            """Go on in this process's directory."""
            elsewhere = Path(_temporary(os.getpid()))
            place = Path(self.cache_dir).parent
            if place == elsewhere:
                raise error
            _warn(str(place), f"{type(error).__name__}: {error.strerror}")
            for part in place.glob(f"{self.key}/tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(part, ignore_errors=True)
            self._move(elsewhere)

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            if self.plain:
                return str(super().put(data, filename, binary))
            try:
                path = str(super().put(data, filename, binary))
            except OSError as error:
                self._leave(error)
                path = str(super().put(data, filename, binary))
            self.digests[filename] = _digest(path)
            if filename.endswith(".so"):  # in no group
                super().put(self.digests[filename], f"{filename}.sha256")
            return path

        def get_file(self, filename: str) -> str | None:
            path: str | None = super().get_file(filename)
            if path is None or self.plain:
                return path
            try:
                want = Path(f"{path}.sha256").read_text()
                return path if want == _digest(path) else None
            except OSError:  # Triton's own, from before
                return path

        def get_group(self, filename: str) -> dict[str, str] | None:
            if self.plain:
                found: dict[str, str] | None = super().get_group(filename)
                return found
            found = self._whole(filename)
            if found is None:
                self._wait()
                found = self._whole(filename)  # another process may have compiled it
            if found is not None:
                self.release()
            return found

        def put_group(self, filename: str, group: dict[str, str]) -> str:
            if self.plain:
                return str(super().put_group(filename, group))
            about = {"key": self.key, "files": {name: self.digests[name] for name in group}}
            self.put(json.dumps(about), f"__sha256__{filename}")
            path = str(super().put_group(filename, group))
            self.release()
            return path

        def _whole(self, filename: str) -> dict[str, str] | None:
            """The group's files, if all of them are there as they were written, for this key."""
            try:
                group = json.loads(Path(self._make_path(f"__grp__{filename}")).read_text())
                about = json.loads(Path(self._make_path(f"__sha256__{filename}")).read_text())
                if about["key"] != self.key or about["files"].keys() != group["child_paths"].keys():
                    return None
                paths = {name: self._make_path(name) for name in about["files"]}
                whole = all(_digest(paths[name]) == d for name, d in about["files"].items())
                return paths if whole else None
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None

        def _wait(self) -> None:
            """Take the key's lock, where files can be locked; released once the group is there."""
            try:
                import fcntl

                file = open(self.lock_path, "a")  # noqa: SIM115
            except (ImportError, OSError):
                return
            end = time.monotonic() + _PATIENCE_S
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                    continue
                except OSError:  # some NFS: compiled twice at worst
                    break
                self.lock = file
                _held.__dict__.setdefault("managers", []).append(self)
                return
            file.close()

        def release(self) -> None:
            file, self.lock = self.lock, None
            if file is not None:
                file.close()

    return Checked
