"""Work over processes: nothing is lost, whatever dies. No torch here, so that they start fast."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from farro.cli.workers import Died, Shares, SpentError, handed_out


def work(number, items):
    """Does what each item says."""
    for item in items:
        _, _, says = item.partition(" ")
        if says == "abort":
            os.kill(os.getpid(), signal.SIGKILL)
        if says == "exit":
            os._exit(3)
        if says == "sleep":
            time.sleep(60)
        yield f"{item} done by {os.getpid()}"
        if says == "lose":
            raise SpentError
        if says == "end after":
            os._exit(4)


def grouped(*names):
    """Two groups of bundles of two items."""
    items = [list(names[at : at + 2]) for at in range(0, len(names), 2)]
    return {"even": items[::2], "odd": items[1::2]}


class TestShares:
    def test_every_item_is_taken_once_in_order_within_its_group(self):
        counts = {"a": 9, "b": 5, "c": 1}
        groups = {key: [(f"{key}{i}", f"{key}{i}'") for i in range(n)] for key, n in counts.items()}
        shares = Shares(groups)
        taken = {key: [] for key in groups}
        active = []
        while (share := shares.take()) is not None:
            taken[share[0]] += share[1]
            active.append(share)
            if len(active) == 3:
                key, items = active.pop(0)
                shares.end(key, len(items), 1.0)
        assert taken == {key: [x for b in bundles for x in b] for key, bundles in groups.items()}

    def test_workers_spread_over_groups_the_longest_first(self):
        shares = Shares({"short": [[1]] * 4, "long": [[1]] * 20, "middle": [[1]] * 12})
        assert [shares.take()[0] for _ in range(3)] == ["long", "middle", "long"]

    def test_what_took_long_is_learnt(self):
        shares = Shares({"slow": [[1]] * 6, "fast": [[1]] * 60})
        assert shares.take()[0] == "fast"  # of as many seconds an item, as long as nothing is known
        shares.end("fast", 6, 0.06)
        shares.active["slow"] += 1
        shares.end("slow", 1, 10.0)
        assert shares.take()[0] == "slow"

    def test_shares_get_short_at_the_end(self):
        shares = Shares({"a": [[i] for i in range(40)]})
        sizes = []
        while (share := shares.take()) is not None:
            sizes.append(len(share[1]))
            if len(sizes) > 2:
                shares.end("a", sizes[-3], 1.0)
        assert sizes[0] == 6 and sizes[-3:] == [1, 1, 1] and sum(sizes) == 40

    def test_what_was_left_is_taken_again(self):
        shares = Shares({"a": [[1, 2], [3, 4]]})
        key, items = shares.take()
        shares.end(key, 1, 1.0, items[1:])
        rest = []
        while (share := shares.take()) is not None:
            rest += share[1]
        assert rest == [2, 3, 4]


class TestHandedOut:
    def test_items_that_end_their_process_are_told_and_the_others_done(self):
        names = [f"{i:02}" for i in range(12)]
        names[1] += " abort"
        names[4] += " lose"  # the first of its bundle
        names[7] += " exit"  # the last
        names[10] += " exit"
        found = list(handed_out(grouped(*names), work, jobs=2))
        results = dict(found)
        assert sorted(results) == sorted(names) and len(found) == len(names)
        died = {name: str(r) for name, r in results.items() if isinstance(r, Died)}
        assert set(died) == {names[1], names[7], names[10]}
        assert "ended by SIGKILL" in died[names[1]]
        assert "exit code 3" in died[names[7]] and "exit code 3" in died[names[10]]
        for name in set(names) - set(died):
            assert results[name].startswith(f"{name} done by ")

    def test_an_end_after_a_result_is_not_lost(self):
        found = list(handed_out({"a": [["1"], ["2 end after"]]}, work, jobs=1))
        assert [name for name, _ in found] == ["1", "2 end after", "2 end after"]
        assert found[-1][1] == Died(4)

    def test_a_deadline_ends_it_with_what_is_there(self):
        start = time.monotonic()
        groups = {"a": [["1"]], "b": [["2 sleep"], ["3"]]}
        with contextlib.closing(handed_out(groups, work, 2, start + 5)) as results:
            found = dict(results)
        assert time.monotonic() - start < 20
        assert set(found) <= {"1", "3"}  # on a busy machine no process has begun

    def test_a_consumer_that_stops_ends_the_processes(self):
        with contextlib.closing(handed_out({"a": [["1"], ["2 sleep"]]}, work, 2)) as results:
            _, result = next(results)
        pid = int(result.rpartition(" ")[2])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_processes_that_cannot_start_are_an_error(self):
        with pytest.raises(RuntimeError, match=r"no worker process starts: .* exit code 1"):
            list(handed_out({"a": [["1"], ["2"]]}, Unreadable(), 2))


class Unreadable:
    """Work that no other process can read."""

    def __reduce__(self):
        return int, ("no number",)
