"""Tables made from measurements: which rows stay, models of times, preferred back ends."""

from __future__ import annotations

import itertools
import json

import pytest

from farro import tuning
from farro.bench import tables

EXACT = {"backend": "triton", "group_size": 256}


def entry_of(m, times, n=8, k=8, backend="triton", tiles=None):
    times = sorted(times, key=lambda pair: pair[1])
    problem = {"backend": backend, "group_size": 256, "dtype": "bfloat16", "m": m, "n": n, "k": k}
    entry = {"problem": problem, "best": times[0][0], "best_us": times[0][1], "times": times}
    return entry if tiles is None else {**entry, "tiles": [tiles[c["name"]] for c, _ in times]}


def sizes_of(entry):
    return {name: entry["problem"][name] for name in ("m", "n", "k")}


def time_of(entry, config):
    return next(us for c, us in entry["times"] if c == config)


def test_rows_that_a_neighbour_serves_are_left_out():
    a, b = {"tile": 1}, {"tile": 2}
    alike = [entry_of(m, [[a, 10.0], [b, 10.1]]) for m in (1, 2, 4)]
    other = entry_of(8, [[a, 12.0], [b, 10.0]])
    rows = tables.thin([*alike, other])
    assert [row["config"] for row in rows] == [b]  # within 2 % everywhere
    other = entry_of(8, [[a, 10.0], [b, 20.0]])
    far = entry_of(64, [[b, 5.0], [a, 50.0]])
    rows = tables.thin([*alike, other, far])
    assert {json.dumps(row["config"]) for row in rows} == {json.dumps(a), json.dumps(b)}
    for entry in (*alike, other, far):
        found = tuning.nearest(tuple(rows), EXACT, sizes_of(entry))
        assert time_of(entry, found) <= 1.02 * entry["best_us"]


def test_layers_of_experts_take_the_nearest_row_in_all_sizes():
    a, b = {"name": "tall"}, {"name": "square"}
    entries = []
    for m, e, best in ((128, 8, a), (1000, 8, a), (8192, 8, a), (128, 128, b), (8192, 128, b)):
        entry = entry_of(m, [[best, 10.0], [b if best is a else a, 20.0]], tiles=TILES)
        entry["problem"] |= {"e": e, "all": e, "topk": 2}
        entries.append(entry)
    rows = tables.rows(entries, 132)
    assert not any("model" in row for row in rows)
    for entry in entries:
        sizes = {name: entry["problem"][name] for name in ("m", "e", "topk", "n", "k")}
        assert tuning.nearest(tuple(rows), EXACT, sizes) == entry["best"]
    assert len(rows) < len(entries)


# --- models --------------------------------------------------------------------------------------

TILES = {"tall": [256, 128], "square": [128, 128]}
KNOWN = {"tall": [3.0, 12.5, 0.75], "square": [1.25, 8.0, 0.5]}
PROBLEMS = tuple(itertools.product((128, 1000, 8192), (1536, 4096, 24576), (1536, 4096, 16384)))


def modelled_us(name, m, n, k, multiprocessors=100):
    """Computed apart: 4 + rounds * (a + b * k / 1000) + c * k / 1000."""
    (rows, columns), (a, b, c) = TILES[name], KNOWN[name]
    tiles = ((m + rows - 1) // rows) * ((n + columns - 1) // columns)
    turns = (tiles + multiprocessors - 1) // multiprocessors
    return 4.0 + turns * (a + b * k / 1000) + c * k / 1000


def entries(problems=PROBLEMS, backend="triton", us=modelled_us):
    def times(size):
        return [[{"name": name}, us(name, *size)] for name in TILES]

    return [entry_of(m, times((m, n, k)), n, k, backend, TILES) for m, n, k in problems]


def test_a_fit_recovers_known_numbers():
    found = {row["config"]["name"]: row for row in tables.models(entries(), 100)}
    assert found.keys() == KNOWN.keys()
    for name, row in found.items():
        assert {k: row[k] for k in ("backend", "group_size", "tile")} == {
            **EXACT,
            "tile": TILES[name],
        }
        assert row["model"] == pytest.approx(KNOWN[name], abs=2e-5)
        for m, n, k in ((700, 5000, 2048), (8192, 7168, 7168)):  # where nothing was measured
            predicted = tuning.predicted_us(row, m, n, k, 100)
            assert predicted == pytest.approx(modelled_us(name, m, n, k), rel=1e-4)


def test_a_fit_to_other_multiprocessors_differs():
    """Otherwise the count would not matter to the test above."""
    found = {row["config"]["name"]: row for row in tables.models(entries(), 132)}
    assert found["tall"]["model"] != pytest.approx(KNOWN["tall"], abs=0.1)


def test_no_number_of_a_model_is_negative():
    """Times that fall with K would have a negative slope, and far away a negative time."""
    falling = entries(us=lambda name, m, n, k: 1000 - k / 100)
    for row in tables.models(falling, 100):
        assert min(row["model"]) >= 0 and len(row["model"]) == 3


def test_what_gets_no_model():
    few = [(m, n, k) for m, (n, k) in itertools.product((1, 16, 64), ((4096, 4096), (8192, 64)))]
    assert tables.models(entries(few), 100) == []  # few rows: the nearest serves
    assert tables.models(entries(PROBLEMS[:3]), 100) == []  # three problems for three numbers
    assert len(tables.models(entries(PROBLEMS[:4]), 100)) > 0
    hopeless = entries(us=lambda name, *size: modelled_us("tall", *size) * (1 + (name == "square")))
    assert [row["config"]["name"] for row in tables.models(hopeless, 100)] == ["tall"]
    untiled = [{k: v for k, v in entry.items() if k != "tiles"} for entry in entries()]
    assert tables.models(untiled, 100) == []  # a log of an earlier version


def test_models_replace_rows_that_they_serve():
    measured = entries()
    odd = entry_of(300, [[{"name": "tall"}, 90.0], [{"name": "square"}, 50.0]], 300, 300)
    found = tables.rows([*measured, odd], 100)
    plain = [row for row in found if "model" not in row]
    assert sum("model" in row for row in found) == 2 and len(plain) <= 2
    for entry in (*measured, odd):
        config = tuning.chosen(tuple(found), EXACT, sizes_of(entry), 100)
        assert time_of(entry, config) <= 1.02 * entry["best_us"]


def test_preferences_name_the_faster_back_end():
    slower = entries(backend="cuda", us=lambda *a: modelled_us(*a) * (1.3 if a[1] < 500 else 0.7))
    measured = [*entries(), *slower]
    found = tables.rows(measured, 100)
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for entry in measured:
        key = tuple(sizes_of(entry).values())
        times.setdefault(key, {})[entry["problem"]["backend"]] = entry["best_us"]
    for size, us in times.items():
        sizes = dict(zip(("m", "n", "k"), size))
        legal = dict.fromkeys(us, lambda config: True)
        named = tuning.preferred(tuple(found), {"group_size": 256}, sizes, 100, legal)
        assert named is not None and us[named] <= 1.02 * min(us.values()), size
    assert tables.preferences(entries()) == []  # a single back end has no rival
