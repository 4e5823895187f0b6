"""What a checkpoint costs: how long training waits, how long the disk takes, and how long a run takes to come back.

    python scripts/bench_save.py --shape 7b --gpus 2 --folder /tmp/save      float32 weights and two moments: 12 bytes a
                                                                            parameter

Beside it, in the same run, plain files of as many writers: what the disk can do. Steps go on while a checkpoint is
written; their times are shown beside those of steps before it. Host memory is prepared beforehand, as in a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_train import SHAPES, model_folder

WRITERS = 4
"""Files at the same time, of each rank."""
CHUNK = 64 << 20


def plain_files(folder: Path, gib: float, rank: int) -> float:
    """Seconds to write ``gib`` GiB in plain files, until they are on the disk."""
    chunk = os.urandom(CHUNK)
    folder.mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        with (folder / f"plain_{rank}_{number}").open("wb", buffering=0) as file:
            for _ in range(int(gib * 2**30 / WRITERS / CHUNK)):
                file.write(chunk)
            os.fsync(file.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    return time.perf_counter() - start


def measure(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    """What one rank sees."""
    import torch
    import torch.distributed as dist

    from posttrain.algos.reduce import token_weights
    from posttrain.config import TrainConfig
    from posttrain.data.pack import PackedBatch, place
    from posttrain.models.load import ModelSource
    from posttrain.train import checkpoint
    from posttrain.train.spec import LossSpec, WorkerSpec
    from posttrain.train.worker import TrainWorker

    train = TrainConfig.model_validate({"param_dtype": "float32", "compile": "off", "gather_weights": "step"})
    spec = WorkerSpec(ModelSource(str(args.model)), args.device, args.dtype, 0, 1.0, train, total_steps=1000)
    worker = TrainWorker(spec, rank, args.gpus)
    metadata = worker.setup("127.0.0.1", args.port, 600.0)
    rows = torch.randint(10_000, (args.gpus, args.length), generator=torch.Generator().manual_seed(0)).tolist()
    batch = PackedBatch.from_sequences(rows, [[True] * args.length] * args.gpus)
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    shard = place(batch.lengths, ranks=args.gpus, token_budget=args.length).shards(batch)[rank]

    def step() -> float:
        start = time.perf_counter()
        worker.update(shard, LossSpec())
        return time.perf_counter() - start

    before = [step() for _ in range(args.steps)][1:]
    start = time.perf_counter()
    worker.prepare_save()
    prepared = []
    while time.perf_counter() < start + 20.0 * (args.device == "cuda"):
        prepared.append(step())
    size = metadata["checkpoint_bytes"]
    result: dict[str, Any] = {"GB": size / 1e9, "step_s": statistics.median(before)}
    result["step_prepared_s"] = max(prepared or [0.0])

    def everywhere(done: bool) -> bool:
        flag = torch.tensor(float(done), device=args.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def timed(work: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    plain = args.folder / "plain"
    gib = min(size / args.gpus / 2**30, args.plain_gib)
    result["plain_GB_s"] = args.gpus * gib * 2**30 / 1e9 / timed(lambda: plain_files(plain, gib, rank))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(plain)
    for number in (1, 2):
        if rank == 0:  # the disk need not hold two
            shutil.rmtree(args.folder / f"global_step_{number - 1}", ignore_errors=True)
        folder = checkpoint.begin(args.folder, number) if rank == 0 else args.folder / f".tmp_global_step_{number}"
        dist.barrier()
        start = time.perf_counter()
        worker.save(str(folder / "actor"), background=True)
        result[f"wait_{number}_s"] = time.perf_counter() - start
        during = []
        while not everywhere((files := worker.saved()) is not None):  # all ranks take as many steps
            during.append(step())
        total = time.perf_counter() - start
        result[f"total_{number}_s"] = total
        result[f"GB_s_{number}"] = size / 1e9 / total
        result[f"step_during_{number}_s"] = statistics.median(during or [0.0])
        of_ranks: list[Any] = [None] * args.gpus
        dist.all_gather_object(of_ranks, files)
        if rank == 0:
            written = {f"actor/{name}": digest for files in of_ranks for name, digest in files.items()}
            start = time.perf_counter()
            checkpoint.commit(folder, number, {"meta.json": {}}, 1, written)
            result[f"commit_{number}_s"] = time.perf_counter() - start
        dist.barrier()
        print(json.dumps(result), file=sys.stderr)
    last = args.folder / "global_step_2"
    if rank == 0:
        start = time.perf_counter()
        assert checkpoint.verify(last) is None
        result["verify_s"] = time.perf_counter() - start
    result["load_s"] = timed(lambda: worker.load(str(last / "actor")))
    dist.destroy_process_group()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--models", type=Path, default=Path("/tmp/posttrain-bench"))
    parser.add_argument("--model", help="a model's folder, instead of a random one of --shape")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="workers")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a step, each worker")
    parser.add_argument("--steps", type=int, default=4, help="before the first save")
    parser.add_argument("--plain-gib", type=float, default=8.0, help="most that each worker writes in plain files")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk in question")
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    if args.rank is not None:
        print(json.dumps(measure(args, args.rank)))
        return
    if args.model is None:
        args.model = str(model_folder(args.models, args.shape))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus)))).split(",")
    ranks = []
    for rank in range(args.gpus):
        env = os.environ | {"CUDA_VISIBLE_DEVICES": devices[rank], "NCCL_NVLS_ENABLE": "0"}
        options = [f"--model={args.model}", f"--rank={rank}", f"--port={port}"]
        ranks.append(
            subprocess.Popen([sys.executable, *sys.argv, *options], env=env, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=1800)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a worker failed")
    result = json.loads(outputs[0].strip().splitlines()[-1])
    print(json.dumps({key: float(f"{value:.4g}") for key, value in result.items()}))


if __name__ == "__main__":
    main()
