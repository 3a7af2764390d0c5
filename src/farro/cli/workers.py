"""Work handed out to processes, one of which may die of an item: the others go on without it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

# items that stay together, in order; a worker gets some neighbours of one group at a time
Bundle = Sequence[Any]
# (number of the worker, items) -> a result for each item, in order; picklable
Work = Callable[[int, Sequence[Any]], Iterable[Any]]

_MOST = 6  # bundles at a time
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class SpentError(Exception):
    """Raised by work after a result: its process cannot go on, and a new one takes the rest."""


@dataclass(frozen=True)
class Died:
    """In place of a result: the process ended while it worked on the item."""

    exitcode: int | None

    def __str__(self) -> str:
        code = self.exitcode
        if code is None or code >= 0:
            return f"the process that ran it ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"the process that ran it was ended by {signal.Signals(-code).name}"
        return f"the process that ran it was ended by signal {-code}"


class Shares:
    """What is left of each group, and which group the next free worker gets a share of.

    Neighbours of a group often need the same compiled kernels. So workers spread over the groups,
    those that will take longest first, and several are in one group only where it takes longer
    than the others. How long an item takes is learnt from the shares that ended.
    """

    def __init__(self, groups: Mapping[Any, Sequence[Bundle]]) -> None:
        self.waiting = {key: deque(bundles) for key, bundles in groups.items()}
        self.items = {key: sum(map(len, bundles)) for key, bundles in groups.items()}
        self.active: Counter[Hashable] = Counter()
        self.ended: Counter[Hashable] = Counter()  # items
        self.seconds: dict[Hashable, float] = dict.fromkeys(groups, 0.0)  # that they took

    def _still(self, key: Hashable) -> float:
        """Seconds that a group's waiting items will take; of those not begun the worst is held."""
        known = {k: self.seconds[k] / ended for k, ended in self.ended.items() if ended}
        return self.items[key] * known.get(key, max(known.values(), default=1.0))

    def take(self) -> tuple[Hashable, list[Any]] | None:
        """A group and neighbouring items of it, fewer toward its end; None where none wait."""
        waiting = [key for key, bundles in self.waiting.items() if bundles]
        if not waiting:
            return None
        key = max(waiting, key=lambda key: self._still(key) / (self.active[key] + 1))
        bundles = self.waiting[key]
        self.active[key] += 1
        count = max(1, min(_MOST, len(bundles) // (2 * self.active[key])))
        share = [item for _ in range(count) for item in bundles.popleft()]
        self.items[key] -= len(share)
        return key, share

    def end(self, key: Hashable, ended: int, seconds: float, left: Sequence[Any] = ()) -> None:
        """A worker ended these of its share of a group in so many seconds, and left the others."""
        self.active[key] -= 1
        self.ended[key] += ended
        self.seconds[key] += seconds
        if left:
            self.waiting[key].appendleft(left)
            self.items[key] += len(left)


@dataclass
class _Worker:
    number: int
    process: Any
    pipe: Any
    started: bool = False
    group: Hashable = None
    share: list[Any] = field(default_factory=list)  # empty: free
    done: int = 0  # items of its share with a result
    since: float = 0.0

    def begin(self, group: Hashable, share: list[Any]) -> None:
        self.group, self.share, self.done, self.since = group, share, 0, time.monotonic()
        with contextlib.suppress(OSError):  # it died; the end of its pipe says so next
            self.pipe.send(share)

    def heard(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return Died(self.process.exitcode)

    def ended(self, shares: Shares) -> None:
        """Its share is over; what has no result is to be done by another."""
        if self.share:
            took = time.monotonic() - self.since
            shares.end(self.group, self.done, took, self.share[self.done :])
        self.share = []


def _main(pipe: Any, number: int, work: Work) -> None:
    os.dup2(2, 1)  # stdout is the report's
    try:
        pipe.send("ready")
        while True:
            for result in work(number, pipe.recv()):
                pipe.send(("result", result))
            pipe.send("ready")
    except SpentError:
        pipe.send("spent")
    except (EOFError, BrokenPipeError):  # the run has ended
        pass


def _start(number: int, work: Work) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_main, args=(there, number, work), daemon=True)
    if hasattr(signal, "pthread_sigmask"):
        # an interrupt is for this process alone, which ends the others; they inherit the mask. The
        # tracker first, for starting it changes the mask again
        from multiprocessing import resource_tracker  # none on Windows

        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    else:
        process.start()
    there.close()
    return _Worker(number, process, here)


def handed_out(
    groups: Mapping[Any, Sequence[Bundle]],
    work: Work,
    jobs: int,
    deadline: float | None = None,  # of time.monotonic()
) -> Generator[tuple[Any, Any], None, None]:
    """Each item with its result, or Died, as they come; ends early at the deadline.

    An item whose process died is not tried again. A process that dies between two items has the
    one before to blame, which then comes twice. RuntimeError where no process starts.
    """
    shares = Shares(groups)
    bundles = sum(len(waiting) for waiting in shares.waiting.values())
    workers: list[_Worker] = []
    try:
        workers += (_start(number, work) for number in range(min(jobs, bundles)))
        while True:
            for worker in workers:
                if worker.started and not worker.share and (taken := shares.take()):
                    worker.begin(*taken)
            if not any(shares.waiting.values()) and not any(worker.share for worker in workers):
                return
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return
            pipes = {worker.pipe: worker for worker in workers}
            for pipe in connection.wait(list(pipes), timeout):
                yield from _listen(pipes[pipe], shares, workers, work)
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(10)


def _listen(
    worker: _Worker, shares: Shares, workers: list[_Worker], work: Work
) -> Iterator[tuple[Any, Any]]:
    """One message of a worker, or its end."""
    message = worker.heard()
    if message == "ready":
        worker.started = True
        worker.ended(shares)
    elif isinstance(message, tuple):
        worker.done += 1
        yield worker.share[worker.done - 1], message[1]
    else:  # it died or says "spent"
        workers.remove(worker)
        if isinstance(message, Died) and worker.share:
            worker.done = min(worker.done + 1, len(worker.share))
            yield worker.share[worker.done - 1], message
        worker.ended(shares)
        if worker.started:
            workers.append(_start(worker.number, work))
        elif not workers:
            raise RuntimeError(f"no worker process starts: {message}")
