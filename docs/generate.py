"""Write docs/performance.md (with plots), docs/support.md, and the generated parts of README.md,
docs/group-size.md, docs/nvfp4-accuracy.md, docs/qsnr.md and docs/numerics.md.

    python docs/generate.py            write them
    python docs/generate.py --check    exit 1 where a committed file differs from that

Everything comes from the catalogue and from benchmarks/results/<device>/*.json: results of
`farro bench --output`, of `farro tune --output` (searches), of `farro eval` (eval.json) and `farro
qsnr` (qsnr.json), and validation.json, which is what `farro verify --json` printed on that device.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

import fp8_numerics  # noqa: E402
import fp8_speed  # noqa: E402
import group_size  # noqa: E402
import model_shapes  # noqa: E402
import noise_study  # noqa: E402

from farro.arch import FEATURE_TEXT, arch_named  # noqa: E402
from farro.catalogue import OPERATORS  # noqa: E402
from farro.dispatch import Kernel, Operator  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PLOTS = "plots"
GROUP_PLOT = f"{PLOTS}/group-size.png"
NOISE_PLOT = f"{PLOTS}/qsnr.png"
ARCHS = ("cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# operators of the specification that have no folder yet, with their public functions
PLANNED = {
    "fp8_quantize": "quantize_fp8_per_tensor, quantize_fp8_per_row, quantize_fp8_1x128, "
    "quantize_fp8_128x128",
    "fp8_linear": "fp8_linear_bf16 and its bias, residual and GELU forms",
    "fp8_blockwise_linear": "fp8_blockwise_linear_bf16",
    "fp8_swiglu_quantize": "fp8_blockwise_swiglu_quantize_fp8",
    "nvfp4_weights": "prune_paired_4of8, compress, decompress, ...",
    "nvfp4_quantize": "quant_act, scatter_quant_act, ...",
    "moe_route": "dispatch_plan, moe_finalize, ...",
    "nvfp4_group_mm": "group_mm, group_mm_swiglu_quant, ...",
}
NOTE = "<!-- written by docs/generate.py; do not edit -->\n"


# --- reading -------------------------------------------------------------------------------------


def devices() -> list[Path]:
    return sorted(p for p in RESULTS.iterdir() if p.is_dir()) if RESULTS.is_dir() else []


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def benchmarks(device: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and content of every benchmark result of a device."""
    found = [(path.stem, _read(path)) for path in sorted(device.glob("*.json"))]
    # eval.json, searches and first calls have rows of their own, which belong to no named set
    mine = [(n, r) for n, r in found if isinstance(r, dict) and "operator" in r]
    mine = [(n, r) for n, r in mine if all("set" in row for row in r.get("rows", ({},)))]
    return [(n, r) for n, r in mine if r.get("schema") == 1]


def validations() -> dict[str, dict[str, tuple[str, int, int, int]]]:
    """Architecture -> kernel -> (device folder, cases that passed, that failed, not run)."""
    found: dict[str, dict[str, tuple[str, int, int, int]]] = {}
    for device in devices():
        path = device / "validation.json"
        if not path.exists():
            continue
        content = _read(path)
        archs = {gpu["device"]: gpu["arch"] for gpu in content["gpus"]} | {"cpu": "cpu"}
        on_gpu = bool(content["gpus"])
        for kernel in content["kernels"]:
            if on_gpu and kernel["device"] == "cpu":
                continue  # the CPU of a GPU's host is not the machine that the folder names
            arch = archs[kernel["device"]]
            counts = kernel["passed"], kernel["failed"], kernel.get("not_run", 0)
            found.setdefault(arch, {})[kernel["kernel"]] = (device.name, *counts)
    return found


# --- the support table ---------------------------------------------------------------------------


def status(kernel: Kernel, arch_name: str, validated: dict[str, Any]) -> str:
    arch = arch_named(arch_name)
    if arch.lacks(kernel.needs) is not None or (kernel.backend == "triton" and arch_name == "cpu"):
        return ""
    device, passed, failed, missing = validated.get(arch_name, {}).get(kernel.name, ("", 0, 0, 0))
    if failed:
        return f"**{failed} cases fail** ({device})"
    if passed and missing:
        return f"{passed} cases agree, {missing} not run yet ({device})"
    if passed:
        return f"validated ({device}, {passed} cases)"
    if kernel.backend in ("triton", "cuda"):
        return "compiles"
    return "the formula" if kernel.backend == "reference" else "not verified yet"


def support_table() -> str:
    validated = validations()
    head = ["operator", "back end", *("CPU" if a == "cpu" else a.upper() for a in ARCHS)]
    rows = []
    for operator in OPERATORS:
        for kernel in operator.kernels:
            cells = [status(kernel, arch, validated) for arch in ARCHS]
            rows.append([f"`{operator.name}`", _backend(operator, kernel), *cells])
    return markdown(head, rows)


def _backend(operator: Operator, kernel: Kernel) -> str:
    """The back end, and the kernel's own name where a back end has several."""
    several = sum(k.backend == kernel.backend for k in operator.kernels) > 1
    return f"{kernel.backend} ({kernel.name.split('.', 1)[1]})" if several else kernel.backend


def support() -> str:
    needs = {f for o in OPERATORS for k in o.kernels for f in k.needs}
    lines = [
        NOTE,
        "# What runs where\n",
        "*validated*: `farro verify` compared the kernel with the reference, or the exact result, "
        "on such a device, and its report is in `benchmarks/results/<device>/validation.json`. "
        "*compiles*: the test suite compiles it for that architecture, and no such report is kept "
        "yet. *the formula*: plain torch operators, what the others are compared with. Empty: "
        "the architecture lacks what the kernel needs.\n",
        support_table(),
        "\nThe public functions of each operator:\n",
        markdown(
            ["operator", "functions"],
            [[f"`{o.name}`", ", ".join(f"`{f}`" for f in o.functions)] for o in OPERATORS],
        ),
        "\nWhat kernels need: "
        + "; ".join(f"`{name}`, {FEATURE_TEXT.get(name, name)}" for name in sorted(needs))
        + ".\n",
    ]
    names = {o.name for o in OPERATORS}
    planned = [[f"`{n}`", text] for n, text in PLANNED.items() if n not in names]
    if planned:
        lines += ["## Planned\n", markdown(["operator", "functions"], planned)]
    return "\n".join(lines)


# --- performance ---------------------------------------------------------------------------------


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _groups(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows of each (N, K, form, dtype, cold); the dense sweep and model_shapes have the others."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["set"] != "dense" and not model_shapes.apart(row):
            key = (row.get("n"), row["k"], _form(row), row["dtype"], row["cold"])
            found.setdefault(key, []).append(row)
    return found


def _form(row: dict[str, Any]) -> str:
    """The group size, or the variant of an operator that has several forms."""
    return row.get("variant") or f"G {row['group_size']}"


def _times(rows: list[dict[str, Any]]) -> str:
    """Microseconds: a line for each M, a column for each subject."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    by = {(row["m"], row["subject"]): row for row in rows}
    lines = []
    for m in sorted({row["m"] for row in rows}):
        cells = [number(by.get((m, s), {}).get("us")) for s in subjects]
        auto = by.get((m, "farro auto"), {})
        tops, floor = auto.get("tops"), auto.get("floor_percent")
        more = [f"{tops:.3g}" if tops else "", f"{floor:.0f} %" if floor else ""]
        lines.append([str(m), *cells, number(auto.get("graph_us")), *more])
    head = ["auto in a CUDA graph", "auto TOPS", "auto, of the floor's speed"]
    return markdown(["M", *subjects, *head], lines)


def _errors(rows: list[dict[str, Any]]) -> str:
    """The largest error of each subject over a group of rows."""
    worst: dict[str, float] = {}
    for row in rows:
        if row["role"] != "floor":
            error = float("inf") if row["error"] is None else row["error"]
            worst[row["subject"]] = max(worst.get(row["subject"], 0.0), error)
    return ", ".join(f"{subject} {error:.1e}" for subject, error in worst.items())


def _host(rows: list[dict[str, Any]]) -> str:
    """For each subject the least and the largest over M."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("host_us") is not None and row["role"] != "floor":
            found.setdefault(row["subject"], []).append(row["host_us"])
    return ", ".join(f"{s} {min(v):.1f} to {max(v):.1f}" for s, v in found.items())


def _about(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    chip = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    when = f"{result['date'][:10]}, commit {result['commit']}"
    return f"{chip}; {when}; {named}. `{result['command']}`\n"


def _ceilings(result: dict[str, Any]) -> str:
    parts = []
    for name, ceiling in result.get("ceilings", {}).items():
        values = [f"{ceiling[k]:.0f} {u}" for k, u in (("gbs", "GB/s"),) if k in ceiling]
        values += [f"{ceiling['tops']:.3g} TOPS"] if "tops" in ceiling else []
        way = f" ({ceiling['way']})" if "way" in ceiling else ""
        parts.append(f"{name} {', '.join(values)}{way}")
    return "Ceilings measured in the same run: " + "; ".join(parts) + ".\n" if parts else ""


def _result(name: str, device: str, result: dict[str, Any]) -> list[str]:
    lines = [f"### {name}\n", _about(result), _ceilings(result)]
    for (n, k, form, dtype, cold), rows in _groups(result["rows"]).items():
        sizes = f"K = {k}" if n is None else f"N = {n}, K = {k}"
        cache = "cold caches" if cold else "warm caches"
        lines.append(f"**{sizes}, {form}, {dtype}, {cache}**, microseconds:\n")
        lines += [_times(rows), f"Largest relative error: {_errors(rows)}.\n"]
        host = _host(rows)
        if host:
            lines.append(f"Host time of an eager call over these M, microseconds: {host}.\n")
    for title, rows, head, table in model_shapes.tables(result["rows"]):
        lines += [f"**{title}**, microseconds:\n", markdown(head, table)]
        lines.append(f"Largest relative error: {_errors(rows)}.\n")
    for step in result.get("steps", []):
        low, high = step["between"]
        sizes = " x ".join(str(step[s]) for s in ("n", "k") if s in step)
        lines.append(
            f"Every M of 1 to 256 at {sizes}, {_form(step)}: the largest step between "
            f"neighbours is {step['largest_step']:.2f}x (M = {low} to {high}).\n"
        )
    lines += [f"![{p}]({PLOTS}/{device}/{p})\n" for p in plot_names(name, result)]
    if result.get("settings", {}).get("stopped_early"):
        lines.append(
            "This run ended at its time limit: cases at the end of its list are missing.\n"
        )
    missing = [f"{m['name']} ({m['reason']})" for m in result.get("missing", [])]
    if missing:
        lines.append("Not run: " + "; ".join(missing) + ".\n")
    return lines


def _search(name: str, result: dict[str, Any]) -> list[str]:
    """How the choice that a call makes compares with the best of a search."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in result["search"]:
        if row["chosen_us"]:
            key = row["backend"], row["set"], _form(row).removeprefix("G ")
            share = min(1.0, row["best_us"] / row["chosen_us"])
            groups.setdefault(key, []).append(share)
    rows = [
        [backend, which, form, str(len(v)), f"{min(v):.3f}", f"{sum(v) / len(v):.3f}"]
        for (backend, which, form), v in groups.items()
    ]
    head = ["back end", "shapes", "G", "problems", "worst", "mean"]
    text = "Speed of the configuration that a call chooses, as a share of the best in a search:\n"
    return [f"### {name}\n", _about(result), text, markdown(head, rows)]


def plot_names(name: str, result: dict[str, Any]) -> list[str]:
    from farro.bench.plots import names

    return [f"{name}-{plot}" for plot in names(result)]


def performance() -> str:
    lines = [
        NOTE,
        "# Performance\n",
        "Measured by `farro bench`, on one harness for every operator: medians of single runs, all "
        "ways of computing a problem timed in turn on the same data, with each result's error. "
        "*read floor* is the time in which the same run's fastest kernel merely reads the bytes of "
        "the call. Cold caches: a buffer larger than the last-level cache is overwritten before "
        "each run. Host time is what one eager call keeps the host busy without waiting, the best "
        "of several series of calls. The JSON behind each table is in "
        "`benchmarks/results/<device>/`.\n",
    ]
    for device in devices():
        results = benchmarks(device)
        if results:
            lines.append(f"## {device.name}\n")
        for name, result in results:
            lines += (
                _search(name, result)
                if result.get("kind") == "search"
                else _result(name, device.name, result)
            )
    return "\n".join(lines)


def performance_summary() -> str:
    """README's table: farro's own choice against the library's BF16 and the best INT8 peer."""
    lines = []
    for device in devices():
        # a CPU's fast path is the packed weight of the module
        operator = "int8_linear" if device.name.startswith("cpu") else "int8_gemm"
        found: dict[tuple[str, ...], list[str]] = {}
        sources = {}
        for _, result in sorted(benchmarks(device), key=lambda item: item[1]["date"]):
            if result["operator"] == operator and "rows" in result:
                rows = {tuple(row[:2]): row for row in _summary_rows(result)}
                found |= rows
                sources |= dict.fromkeys(rows, result)
        if found:
            head = ["(M, N, K)", "G", "farro, us", "TOPS", "library BF16, us", "speed-up"]
            head += ["best INT8 peer with scales, us"]
            if not any(row[-1] for row in found.values()):  # none is on a CPU
                found, head = {key: row[:-1] for key, row in found.items()}, head[:-1]
            used = {id(sources[key]): sources[key] for key in found}
            lines += [*map(group_size.about, used.values()), ""]
            lines += [markdown(head, list(found.values()))]
    return "\n".join(lines) if lines else "No results yet.\n"


def _summary_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for (n, k, form, _, cold), members in _groups(result["rows"]).items():
        if form != "G 256" or (n, k) not in group_size.SHAPES or not cold:
            continue
        by = {(row["m"], row["subject"]): row for row in members}
        for m in sorted({row["m"] for row in members}):
            auto = by.get((m, "farro auto"))
            if auto is None:
                continue
            bf16 = next((r["us"] for (x, s), r in by.items() if x == m and "BF16" in s), None)
            scaled = ("Humming", "plain Triton")
            peers = [r["us"] for (x, s), r in by.items() if x == m and s.startswith(scaled)]
            speedup = f"{bf16 / auto['us']:.2f}x" if bf16 else ""
            best = number(min(peers)) if peers else ""
            cells = [
                f"{m}, {n}, {k}",
                form.removeprefix("G "),
                number(auto["us"]),
                f"{auto['tops']:.3g}",
            ]
            rows.append([*cells, number(bf16), speedup, best])
    return rows


# --- writing -------------------------------------------------------------------------------------


def between(text: str, name: str, content: str) -> str:
    """`text` with what is between the markers of `name` replaced."""
    pattern = re.compile(rf"(<!-- generated:{name} -->\n).*?(<!-- /generated -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}{match[2]}", text)


def nvfp4_accuracy() -> str:
    """Of `farro eval` into the folder nvfp4 of a device's results."""
    found = group_size.evaluations([device / "nvfp4" for device in devices()])
    return group_size.accuracy_tables(found) or "Not measured yet.\n"


def texts() -> dict[Path, str]:
    """What each generated file must hold."""
    readme = (ROOT / "README.md").read_text()
    readme = between(readme, "support", support_table())
    readme = between(readme, "performance", performance_summary())
    readme = between(readme, "fp8-performance", fp8_speed.summary(devices()))
    docs = ROOT / "docs"
    groups = (docs / "group-size.md").read_text()
    groups = between(groups, "accuracy", group_size.accuracy(devices()))
    groups = between(groups, "speed", group_size.speed(devices()))
    groups = between(groups, "plot", group_size.plot(devices(), GROUP_PLOT))
    sparse = (docs / "nvfp4-accuracy.md").read_text()
    sparse = between(sparse, "accuracy", nvfp4_accuracy())
    noise = (docs / "qsnr.md").read_text()
    noise = between(noise, "tables", noise_study.tables(devices()))
    noise = between(noise, "plot", noise_study.plot(devices(), NOISE_PLOT))
    sums = (docs / "numerics.md").read_text()
    sums = between(sums, "fp8-model", fp8_numerics.modelled(devices()))
    sums = between(sums, "fp8-measured", fp8_numerics.measured(devices()))
    sums = between(sums, "fp8-fast", fp8_numerics.fast(devices()))
    return {
        docs / "numerics.md": sums,
        docs / "qsnr.md": noise,
        docs / "performance.md": performance().rstrip("\n") + "\n",
        docs / "support.md": support().rstrip("\n") + "\n",
        docs / "group-size.md": groups,
        docs / "nvfp4-accuracy.md": sparse,
        ROOT / "README.md": readme,
    }


def draw() -> None:
    from farro.bench.plots import draw as draw_result

    for device in devices():
        for name, result in benchmarks(device):
            if "rows" in result:
                draw_result(result, ROOT / "docs" / PLOTS / device.name, prefix=f"{name}-")
    group_size.draw(devices(), ROOT / "docs" / GROUP_PLOT)
    noise_study.draw(devices(), ROOT / "docs" / NOISE_PLOT)


def outdated() -> list[str]:
    """Files that differ from what would be written; plots count by being there."""
    found = [
        str(path.relative_to(ROOT))
        for path, text in texts().items()
        if not path.exists() or path.read_text() != text
    ]
    for device in devices():
        for name, result in benchmarks(device):
            for plot in plot_names(name, result) if "rows" in result else ():
                path = ROOT / "docs" / PLOTS / device.name / plot
                if not path.exists():
                    found.append(str(path.relative_to(ROOT)))
    shown = (
        (GROUP_PLOT, group_size.plot(devices(), GROUP_PLOT)),
        (NOISE_PLOT, noise_study.plot(devices(), NOISE_PLOT)),
    )
    for plot, line in shown:
        path = ROOT / "docs" / plot
        if not path.exists() and plot in line:
            found.append(str(path.relative_to(ROOT)))
    return found


def main() -> int:
    if "--check" in sys.argv[1:]:
        old = outdated()
        for path in old:
            print(f"{path} is not what docs/generate.py writes: run `make docs`")
        return 1 if old else 0
    for path, text in texts().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
