"""Time a process's first call of a native kernel, with a cold and with a warm disk cache.

python benchmarks/device/first_call.py [--output benchmarks/results/h200/first_call.json]

Each figure is from processes of its own, which import everything and use the GPU first, so that it
holds the compilation or the reading of the CUBIN, loading the module, the TMA descriptors and the
launch, up to the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
import torch, farro
import cuda.core
import farro.cuda.launch, farro.cuda.tensor_map
m, n, k, group_size = map(int, sys.argv[1:])
a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
b = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda").T
groups = -(-k // group_size)
scales = [torch.rand(shape, device="cuda") for shape in ((m, groups), (groups, n))]
(a.float() @ b.float()).sum().item()
torch.cuda.synchronize()
times = []
for _ in range(2):
    start = time.perf_counter()
    farro.int8_gemm(a, b, *scales, group_size=group_size, backend="cuda")
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""
PROBLEMS = ((8192, 4096, 4096, 256), (1, 4096, 4096, 256), (64, 7168, 16384, 128))


def process(problem: tuple[int, ...], cache: str) -> list[float]:
    environment = {**os.environ, "FARRO_CACHE_DIR": cache}
    command = [sys.executable, "-c", CHILD, *map(str, problem)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return [1e3 * seconds for seconds in json.loads(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch

    from farro.bench import results

    result = results.empty("first_call", torch.device("cuda"), sys.argv)
    for problem in PROBLEMS:
        cold, warm, second = [], [], []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(process(problem, cache)[0])
                first, again = process(problem, cache)
                warm.append(first)
                second.append(again)
        row = dict(zip(("m", "n", "k", "group_size"), problem))
        row |= {"cold_ms": cold, "warm_ms": warm, "second_call_ms": second}
        result["rows"].append(row)
        cold_ms, warm_ms, second_ms = map(statistics.median, (cold, warm, second))
        print(f"{problem}: cold {cold_ms:.0f} ms, warm {warm_ms:.1f} ms, then {second_ms:.2f} ms")
    if options.output:
        results.save(options.output, result)


if __name__ == "__main__":
    main()
