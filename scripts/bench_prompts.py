"""What `train.share_prompts` saves: the same groups with every prompt computed once, and once for each sequence.

    python scripts/bench_prompts.py                                    the tiny model
    python scripts/bench_prompts.py --shape 135m --groups 1 --prompt 100 400 --response 100
    python scripts/bench_prompts.py --shape 0.5b --groups 128 --prompt 512 --response 1024 --tokens-per-microbatch 65536

Both ways run in one process and take turns, step by step, on a GPU where there is one. A row says by which factor a
pass without gradients and an update got faster (medians), and which share of the tokens was computed. Loss and gradient
norm must be the same; responses are between half of `--response` and all of it. On a CPU one thread computes, and the
seconds are its own: those of the processor, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def groups_of(args: argparse.Namespace, prompt: int, vocabulary: int) -> Any:
    """A batch of `--groups` prompts with `--n` responses each, as `rl` makes it."""
    import torch

    from posttrain.algos.reduce import token_weights
    from posttrain.data.pack import PackedBatch

    rng = random.Random(0)
    ids, masks = [], []
    for _ in range(args.groups):
        shared = rng.choices(range(vocabulary), k=prompt)
        for _ in range(args.n):
            length = rng.randint(args.response // 2, args.response)
            ids.append([*shared, *rng.choices(range(vocabulary), k=length)])
            masks.append([False] * prompt + [True] * length)
    batch = PackedBatch.from_sequences(ids, masks)
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    batch.advantages = torch.randn(batch.num_sequences).repeat_interleave(batch.cu_seqlens.diff().long())
    return batch


def open_worker(args: argparse.Namespace) -> Any:
    """A training worker with the model, as `rl` starts it."""
    import torch

    from posttrain.config import TrainConfig
    from posttrain.models.load import ModelSource
    from posttrain.train.spec import WorkerSpec
    from posttrain.train.worker import TrainWorker

    gpu = torch.cuda.is_available()
    train = {
        "param_dtype": "bfloat16" if gpu else "float32", "attention": args.attention, "compile": args.compile,
        "activation_checkpointing": args.checkpointing, "lora": {"rank": args.lora_rank},
        "optim": {"lr": 0.0, "weight_decay": 0.0},
    }  # fmt: skip
    device, dtype = ("cuda", "bfloat16") if gpu else ("cpu", "float32")
    source = ModelSource(str(args.model))
    spec = WorkerSpec(source, device, dtype, 0, 1.0, TrainConfig.model_validate(train), threads=0 if gpu else 1)
    worker = TrainWorker(spec, 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return worker, worker.setup("127.0.0.1", port, 300.0)


def measure(args: argparse.Namespace, worker: Any, metadata: dict[str, Any], prompt: int) -> dict[str, Any]:
    """Steps with and without sharing, in turns."""
    import torch

    from posttrain.config import AlgoConfig
    from posttrain.data.pack import place, place_by_prompt
    from posttrain.data.prompts import Prompts
    from posttrain.train.spec import LossSpec

    batch = groups_of(args, prompt, worker.lm.model.config.vocab_size)
    prompts, budget = Prompts.of(batch), args.tokens_per_microbatch
    shards = {
        "plain": place(batch.lengths, ranks=1, token_budget=budget).shards(batch)[0],
        "shared": place_by_prompt(prompts, ranks=1, token_budget=budget).shards(batch)[0],
    }
    seconds: dict[str, list[float]] = {f"{what} {way}": [] for way in shards for what in ("pass", "update")}
    results, memory = {}, {}

    clock = time.perf_counter if torch.cuda.is_available() else time.process_time

    def timed(what: str, call: Any) -> Any:
        start = clock()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[what].append(clock() - start)
        return result

    for _ in range(args.warm_up + args.steps):
        for way, shard in shards.items():
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            timed(f"pass {way}", lambda shard=shard: worker.logprobs(shard))
            results[way] = timed(f"update {way}", lambda shard=shard: worker.update(shard, LossSpec(AlgoConfig())))
            memory[way] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    median = {what: statistics.median(values[args.warm_up :]) for what, values in seconds.items()}
    row = {
        "prompt": prompt,
        "tokens": batch.num_tokens,
        "saved": prompts.saved / batch.num_tokens,
        "pays above": metadata["sharing_cost"],
        "micro-batches": {way: len(shard) for way, shard in shards.items()},
        "update_s": {way: median[f"update {way}"] for way in shards},
        "update": median["update plain"] / median["update shared"],
        "pass": median["pass plain"] / median["pass shared"],
        "grad_norm": {way: result.shared["grad_norm"] for way, result in results.items()},
    }
    return row | ({"memory_gib": memory} if memory["plain"] is not None else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="of a random model (bench_train.SHAPES); by default builtin:tiny")
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--models", type=Path, default=Path("/tmp/posttrain-bench"))
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="sequences of a group")
    parser.add_argument("--prompt", type=int, nargs="+", default=[8, 64, 256], help="tokens")
    parser.add_argument("--response", type=int, default=128, help="tokens of the longest")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--lora-rank", type=int)
    args = parser.parse_args()
    if args.shape and not args.model:
        make = "import bench_train as b; from pathlib import Path; "
        make += f"b.model_folder(Path({str(args.models)!r}), {args.shape!r})"
        command = [sys.executable, "-c", make]
        subprocess.run(command, check=True, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
        args.model = args.models / args.shape
    args.model = args.model or "builtin:tiny"
    worker, metadata = open_worker(args)
    print(json.dumps({key: metadata[key] for key in ("parameters", "device", "dtype", "attention")}))
    for prompt in args.prompt:
        row = measure(args, worker, metadata, prompt)
        print(json.dumps(row | {"load": os.getloadavg()[0]}, default=float), flush=True)


if __name__ == "__main__":
    main()
