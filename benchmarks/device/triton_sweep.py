"""Times configurations of the Triton int8_gemm on this GPU; writes JSON, prints a short table.

    python benchmarks/device/triton_sweep.py --out sweep.json --budget-s 400 \
        --shapes 8192x4096x4096:256 16x7168x16384:256

Shapes are MxNxK:G. Configurations are compiled first, by a pool of processes that need no GPU, into
Triton's own cache. Each is then run, its sampled rows compared bit for bit with the reference, and
timed with a cold L2 (median). Timing happens in a child process: one that crashes or stalls loses
that configuration alone. Results are appended as they come (JSON lines beside --out).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from farro.arch import arch_named
from farro.ops.int8_gemm import reference
from farro.ops.int8_gemm import triton as backend
from farro.problem import Problem
from farro.triton_launch import compile_only, resources

DEFAULT = (
    *("8192x4096x4096:256", "8192x4096x4096:128", "16x7168x16384:256", "16x24576x1536:256"),
    *("64x7168x16384:256", "1x4096x4096:256", "256x4096x4096:256", "1024x7168x16384:256"),
)
STALL_S = 30  # no configuration needs this long: a child silent for so long hangs


def parse(shape):
    sizes, _, group = shape.partition(":")
    m, n, k = (int(v) for v in sizes.split("x"))
    return m, n, k, int(group or 256)


def operands(m, n, k, group, device):
    """The arguments of run() after its configuration; codes as a quantizer leaves them."""
    if device == "meta":
        codes = lambda r, c: torch.empty(r, c, dtype=torch.int8, device=device)  # noqa: E731
        scales = lambda r, c: torch.empty(r, c, device=device)  # noqa: E731
    else:
        codes = lambda r, c: (  # noqa: E731
            (torch.randn(r, c, device=device) * 45).round().clamp(-127, 127).to(torch.int8)
        )
        scales = lambda r, c: torch.rand(r, c, device=device) * 1e-2 + 5e-3  # noqa: E731
    groups = -(-k // group)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return codes(m, k), codes(n, k).T, scales(m, groups), scales(groups, n), None, out, group


def problem_of(shape, arch):
    names = ("a", "b", "scale_a", "scale_b", "bias", "out")
    *tensors, group = operands(*parse(shape), "meta")
    return Problem.of("int8_gemm", dict(zip(names, tensors)), {"group_size": group}, arch)


def compile_one(job):
    """In a pool process, without the GPU: fills Triton's cache; the error's text if it fails."""
    values, shape, capability = job
    try:
        *tensors, group = operands(*parse(shape), "meta")
        call = backend.prepare(backend.Config.from_dict(values), *tensors, group)
        compiled = compile_only(call.kernel, call.args(*tensors), call.options, capability)
        registers, stack = resources(compiled)
        if stack > 256:
            return f"spills: {stack} bytes of stack a thread ({registers} registers)"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return None


def cold_median_us(function, flush, budget_s=0.25):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, began = [], time.time()
    while len(times) < 7 or (len(times) < 25 and time.time() - began < budget_s):
        flush.zero_()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[len(times) // 2]


def child(args):
    """Run the configurations of one shape, a JSON line before and after each."""
    torch.manual_seed(0)
    jobs = json.loads(Path(args.child).read_text())
    given = operands(*parse(jobs["shape"]), "cuda")
    a, b, scale_a, scale_b, bias, out, group = given
    m = a.shape[0]
    sample = torch.unique(torch.tensor([0, m // 3, m // 2, m - 1, *range(max(0, m - 60), m)]))
    expected = torch.empty(len(sample), b.shape[1], dtype=out.dtype, device="cuda")
    rows = sample.cuda()
    reference.run(None, a[rows], b, scale_a[rows], scale_b, bias, expected, group)
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for index, values in jobs["configs"]:
        print(json.dumps({"index": index, "begins": True}), flush=True)
        line = {"index": index, "config": values}
        try:
            config = backend.Config.from_dict(values)
            run = lambda: backend.run(config, *given)  # noqa: B023, E731
            out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            line["exact"] = torch.equal(out[rows], expected)
            line["us"] = cold_median_us(run, flush)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
        print(json.dumps(line), flush=True)
        if "CUDA error" in line.get("error", "") or "Triton Error" in line.get("error", ""):
            os._exit(3)  # the context is lost; the parent starts another child


def time_shape(shape, configs, deadline, log):
    """All results of a shape: children are restarted past a configuration that kills them."""
    import queue
    import threading

    todo, results = list(enumerate(configs)), []
    while todo and time.time() < deadline:
        job = Path(log.name + ".job")
        job.write_text(json.dumps({"shape": shape, "configs": [(i, asdict(c)) for i, c in todo]}))
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(job)], stdout=subprocess.PIPE, text=True
        )
        lines = queue.Queue()
        reader = threading.Thread(
            target=lambda p=process, q=lines: [q.put(t) for t in p.stdout] and None, daemon=True
        )
        reader.start()
        running, seen, last = None, False, time.time()
        while True:
            try:
                line = json.loads(lines.get(timeout=0.5))
            except queue.Empty:
                silent = time.time() - last
                if process.poll() is not None and lines.empty():
                    break
                if silent > STALL_S + (0 if seen else 60) or time.time() > deadline:
                    process.kill()
                    break
                continue
            except ValueError:
                continue
            last, seen = time.time(), True
            if line.get("begins"):
                running = line["index"]
                continue
            results.append(line)
            log.write(json.dumps({"shape": shape, **line}) + "\n")
            log.flush()
            todo = [(i, c) for i, c in todo if i != line["index"]]
            running = None
        process.wait()
        if running is not None and time.time() < deadline:  # it crashed or stalled
            crash = {"index": running, "config": asdict(configs[running]), "error": "crash or hang"}
            results.append(crash)
            log.write(json.dumps({"shape": shape, **crash}) + "\n")
            todo = [(i, c) for i, c in todo if i != running]
        elif not seen:
            print(f"{shape}: the child printed nothing; giving up this shape", flush=True)
            break
    return results


def show(shape, results, top=6):
    m, n, k, _ = parse(shape)
    good = sorted((r for r in results if r.get("exact") and "us" in r), key=lambda r: r["us"])
    wrong = [r for r in results if r.get("exact") is False]
    failed = [r for r in results if "error" in r]
    print(f"\n{shape}: {len(good)} exact, {len(wrong)} WRONG, {len(failed)} failed", flush=True)
    for r in good[:top]:
        c = r["config"]
        text = f"{c['family']:11s} {'swap' if c['swap'] else '    '} "
        text += f"{c['block_m']}x{c['block_n']}x{c['block_k']} band {c['group_m']} "
        text += f"warps {c['warps']} stages {c['stages']}"
        tops = 2 * m * n * k / r["us"] / 1e6
        rate = (m * k + n * k + 2 * m * n) / r["us"] / 1e6
        print(f"  {r['us']:8.1f} us {tops:7.1f} TOPS {rate:5.2f} TB/s  {text}")
    for family in ("pointers", "descriptors", "specialized", "ring"):
        best = next((r for r in good if r["config"]["family"] == family), None)
        if best is not None:
            print(f"  best {family}: {best['us']:.1f} us {best['config']}")
    for r in (wrong + failed)[:4]:
        print(f"  {'WRONG' if 'error' not in r else r['error'][:200]}: {r['config']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(DEFAULT))
    parser.add_argument("--out", default="triton_sweep.json")
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--limit", type=int, default=0, help="configurations a shape, 0 for all")
    parser.add_argument("--only", default="", help="families, comma separated")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--compile-only", default="", help="sm_90: stop after compiling, no GPU")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    began = time.time()
    if args.compile_only:
        arch = arch_named(args.compile_only)
    else:
        # Asked of a child, so that this process can fork and never touches CUDA
        ask = "import torch; print(*torch.cuda.get_device_capability())"
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        arch = arch_named("sm_" + "".join(asked.stdout.split()))
    plans = {}
    for shape in args.shapes:
        found = backend.candidates(problem_of(shape, arch))
        only = args.only.split(",") if args.only else None
        found = [c for c in found if only is None or c.family in only]
        plans[shape] = found[: args.limit] if args.limit else found
    jobs = [(asdict(c), shape, arch.capability) for shape in args.shapes for c in plans[shape]]
    errors = {}
    with concurrent.futures.ProcessPoolExecutor(args.workers) as pool:
        for job, error in zip(jobs, pool.map(compile_one, jobs, chunksize=4)):
            if error is not None:
                errors[json.dumps(job[:2], sort_keys=True)] = error
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s, {len(errors)} failed", flush=True)
    for error in sorted(set(errors.values()))[:3]:
        print(f"  {error}")
    if args.compile_only:
        return
    everything = {}
    with open(args.out + "l", "w") as log:
        for at, shape in enumerate(args.shapes):
            kept = [
                c
                for c in plans[shape]
                if json.dumps([asdict(c), shape], sort_keys=True) not in errors
            ]
            left = began + args.budget_s - time.time()
            deadline = time.time() + left / (len(args.shapes) - at)
            results = time_shape(shape, kept, deadline, log)
            results += [
                {"config": asdict(c), "error": error}
                for c in plans[shape]
                if (error := errors.get(json.dumps([asdict(c), shape], sort_keys=True)))
            ]
            everything[shape] = sorted(results, key=lambda r: r.get("us", 1e9))
            Path(args.out).write_text(json.dumps(everything, indent=1))
            show(shape, results)
    print(f"\n{time.time() - began:.0f} s in all; {args.out}")


if __name__ == "__main__":
    main()
