"""Results on disk, what they say of the machine, and the comparison of two of them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..tuning import write_whole

SCHEMA = 1
PACKAGES = ("torch", "triton", "humming-kernels", "sgl-deep-gemm", "deep-gemm", "cuda-core")
# what a row of results has beside its sizes (m, n, k) and settings (group_size, dtype, ...)
MEASURES = (
    *("us", "us_low", "us_high", "graph_us", "host_us", "tops", "gbs", "floor_us"),
    *("floor_percent", "ceiling_percent", "error", "peak_bytes", "runs"),
)
_ROOT = Path(__file__).resolve().parents[3]


def device_slug(device: torch.device) -> str:
    """A machine kind as a folder's name: "h200", "cpu_x86_64_avx512_vnni"; never a host's name."""
    if device.type == "cuda":
        name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(device).lower()).strip("_")
        return name.removeprefix("nvidia_")
    capability = torch.backends.cpu.get_cpu_capability().lower()
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    parts = ["cpu", platform.machine().lower(), capability] + (["vnni"] if vnni else [])
    return re.sub(r"[^a-z0-9]+", "_", "_".join(parts))


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    about: dict[str, Any] = {"device": device_slug(device), "threads": torch.get_num_threads()}
    about["cpu"] = _cpu_model()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "compute_capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver(),
        }
    return about


def versions() -> dict[str, str]:
    from .. import __version__

    found = {"farro": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The git commit of this checkout, with "-dirty" where files differ; FARRO_COMMIT beats it."""
    if os.environ.get("FARRO_COMMIT"):
        return os.environ["FARRO_COMMIT"]
    if not (_ROOT / ".git").exists():
        return None
    try:
        head = _output("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
        changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "-uno", "src")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changed else "")


def _output(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return run.stdout.strip()


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _driver() -> str | None:
    try:
        return _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        )
    except (OSError, subprocess.SubprocessError):
        return None


def empty(operator: str, device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """A result with no rows yet."""
    return {
        "schema": SCHEMA,
        "operator": operator,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        # of a path its last part: results are published, the machine's folders are not
        "command": " ".join(Path(c).name if c.startswith("/") else c for c in command),
        "commit": commit(),
        "machine": machine(device),
        "versions": versions(),
        "settings": {},
        "ceilings": {},
        "missing": [],
        "failed": [],
        "steps": [],
        "rows": [],
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole: one row of it a line, so that a diff of two can be read."""
    head = {key: value for key, value in result.items() if key != "rows"}
    lines = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in result["rows"])
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    write_whole(path, f'{text},\n "rows": [\n{lines}\n ]\n}}\n')


def load(path: Path) -> dict[str, Any]:
    """Read a result; ValueError where it is not one of this schema."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no text, or no JSON
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not _is_result(result):
        raise ValueError(f"{path}: not a result of farro bench (schema {SCHEMA})")
    return result


def _is_result(result: Any) -> bool:
    """Whether it has all that a comparison reads: told before a run that would end in vain."""
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        return False
    if not isinstance(result.get("settings", {}), dict):
        return False
    machine, rows = result.get("machine"), result.get("rows")
    if not isinstance(machine, dict) or "device" not in machine or not isinstance(rows, list):
        return False
    return isinstance(result.get("operator"), str) and all(map(_is_row, rows))


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not {"subject", "role", "us"} <= row.keys():
        return False
    us, error = row["us"], row.get("error")
    timed = us is None or (type(us) in (int, float) and us > 0)
    return timed and (error is None or type(error) in (int, float))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two rows the same measurement."""
    names = ("subject", "set", "m", "n", "k", "e", "group_size", "variant", "dtype", "cold")
    return tuple(row.get(name) for name in names)


def label(row: dict[str, Any]) -> str:
    sizes = " x ".join(str(row[name]) for name in ("m", "n", "k") if name in row)
    experts = f" of {row['e']} experts" if "e" in row else ""
    form = setting(row)
    return f"{row['subject']} at {sizes}{experts}{form and ' '}{form}"


def setting(row: dict[str, Any]) -> str:
    """The form of the operator that a row is of: its variant, or G and its group size."""
    return str(row.get("variant") or (f"G{row['group_size']}" if "group_size" in row else ""))


def regressions(
    now: dict[str, Any], before: dict[str, Any], margin: float
) -> tuple[list[str], int]:
    """farro's rows that got slower (or less exact) than `before` by more than `margin`.

    Gives the lines to print and how many rows were compared. ValueError where the two are of
    different operators or machine kinds, or one of graphs (--brief) and one of calls: such times do
    not compare.
    """
    for what, a, b in (
        ("operator", now["operator"], before["operator"]),
        ("machine", now["machine"]["device"], before["machine"]["device"]),
        ("way of timing", *map(_timed, (now, before))),
    ):
        if a != b:
            raise ValueError(f"--check: the earlier result is of another {what}: {b}, this is {a}")
    earlier = {key(row): row for row in before["rows"] if row["role"] == "farro"}
    lines, compared = [], 0
    for row in now["rows"]:
        old = earlier.get(key(row))
        if row["role"] != "farro" or old is None or row["us"] is None or old["us"] is None:
            continue
        compared += 1
        ratio = row["us"] / old["us"]
        if ratio > 1 + margin:
            lines.append(f"{label(row)}: {row['us']:.1f} us, was {old['us']:.1f} ({ratio:.2f}x)")
        worse = row.get("error") is None or row["error"] > 1.5 * (old.get("error") or 0) + 1e-7
        if worse and old.get("error") is not None:
            lines.append(f"{label(row)}: error {row.get('error')}, was {old['error']}")
    return lines + _gone(now, earlier), compared


def _timed(result: dict[str, Any]) -> str:
    return str(result.get("settings", {}).get("timed", "calls"))


def _gone(now: dict[str, Any], earlier: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """farro's subjects that were measured earlier in a case of this run, and are not now."""
    measured = {key(row) for row in now["rows"] if row["role"] == "farro"}
    cases, subjects = {found[1:] for found in measured}, {found[0] for found in measured}
    asked = "farro auto" in subjects  # a run that asks for some back ends leaves out others
    return [
        f"{label(row)}: not measured now, was {row['us']:.1f} us"
        for found, row in earlier.items()
        if asked and found not in measured and found[1:] in cases and row["us"] is not None
    ]


def behind(rows: Iterable[dict[str, Any]], margin: float = 0.05) -> tuple[list[str], int]:
    """Where `auto` is slower than the best back end by more than `margin`; cases compared."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "farro" and row["us"] is not None:
            cases.setdefault(key(row)[1:], {})[row["subject"]] = row
    lines, compared = [], 0
    for subjects in cases.values():
        auto = subjects.pop("farro auto", None)
        forced = [row for name, row in subjects.items() if name in _FORCED]
        if auto is None or not forced:
            continue
        compared += 1
        best = min(forced, key=lambda row: row["us"])
        if auto["us"] > best["us"] * (1 + margin):
            lines.append(
                f"{label(auto)} ({auto['kernel']}): {auto['us']:.1f} us, "
                f"{best['subject']} {best['us']:.1f} ({auto['us'] / best['us']:.2f}x)"
            )
    return lines, compared


_FORCED = tuple(f"farro {name}" for name in ("reference", "cpu", "triton", "cuda"))
