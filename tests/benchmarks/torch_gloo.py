"""PyTorch's Gloo all-reduce between two processes on this machine, for comparison.

    python tests/benchmarks/torch_gloo.py [--nproc 2] [--json FILE]

Needs torch, in an environment of its own: it has no place beside JAX.  Sizes, samples and calls per
sample are those of `python -m jaxdp.compare`; each process is pinned to a core likewise.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [1 << k for k in range(10, 25, 2)]


def measure(rank: int, size: int, port: int, path: str | None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    rows = []
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4)
        calls = int(np.clip((4 << 20) // nbytes, 1, 32))
        for _ in range(3):
            dist.all_reduce(x)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(x)
            times.append((time.perf_counter() - started) / calls)
        rows.append({"bytes": nbytes, "time_us": float(np.median(times)) * 1e6})
        if rank == 0:
            print(f"{nbytes:>10} bytes  {rows[-1]['time_us']:>10.1f} us")
    if rank == 0 and path:
        with open(path, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    mp.spawn(measure, (args.nproc, 29571, args.json), nprocs=args.nproc)


if __name__ == "__main__":
    main()
