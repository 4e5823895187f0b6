"""How far the trainer's log-probabilities are from an engine's on what it sampled, and what
`rollout.batch_invariant` changes.

    python scripts/bench_gap_gpu.py --engine sglang --tokenizer FOLDER --data FOLDER

The model is that of `gpu_model.py`, the prompts GSM8K's with the gsm8k tool; `--data` is what `posttrain prep gsm8k`
wrote. One row a mode. "Alone, among others": largest difference of the log-probabilities of the same eight sequences,
each by itself and in a batch of 64; 0 is batch-invariant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_model import trained_model
from rich.console import Console
from rich.table import Table

from posttrain.algos.gap import gap_sums
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config import Config
from posttrain.core.types import Ids, SamplingParams
from posttrain.data.pack import PackedBatch
from posttrain.data.parquet import read_prompts
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.runs.episodes import episode_context

FEW, MANY = 8, 64


def config(args: argparse.Namespace, exact: bool) -> Config:
    rollout = {
        "engine": args.engine, "batch_invariant": exact, "memory_fraction": 0.4, "max_prompt_tokens": 1024,
        "max_response_tokens": 1024, "max_concurrent": args.prompts, "engine_options": args.options,
        "tools": ["gsm8k"], "max_turns": 2,
    }  # fmt: skip
    cluster = {"device": "cuda", "start_deadline_s": 300.0}
    train = {"tokens_per_microbatch": 32768}
    return Config.model_validate({"command": "rl", "rollout": rollout, "cluster": cluster, "train": train})


async def measure(args: argparse.Namespace, exact: bool) -> dict[str, Any]:
    cfg, source = config(args, exact), ModelSource(str(args.model))
    env = episode_context(cfg, source, load_tokenizer(source))
    asked = [env.prompt_ids(p) for p in read_prompts(str(args.data / "train.parquet"))[: args.prompts]]
    async with Cluster(cfg) as cluster:
        actor = await cluster.trainer("actor", source)
        sync = SyncedSamplers(cluster, actor, [actor])
        begun = time.perf_counter()
        pool = await sync.start(source, sorted(env.stop_token_ids))
        started = time.perf_counter() - begun
        [sampler] = pool.samplers
        await sync.publish(1, [ids[:256] for ids in asked[:4]])
        for _ in range(2):  # the first time kernels are compiled
            begun = time.perf_counter()
            samples = await asyncio.gather(*(sampler.generate(ids, SamplingParams(args.new)) for ids in asked))
            seconds = time.perf_counter() - begun
        whole = [[*ids, *sample.ids] for ids, sample in zip(asked, samples, strict=True)]
        masks = [[False] * len(ids) + [True] * len(s.ids) for ids, s in zip(asked, samples, strict=True)]
        batch = PackedBatch.from_sequences(whole, masks)
        for _ in range(2):
            begun = time.perf_counter()
            ours = await actor.logprobs(batch)
            scored = time.perf_counter() - begun
        found = torch.tensor([x for sample in samples for x in sample.logprobs])
        sums = {name.removeprefix("gap/"): float(x) for name, x in gap_sums(ours[batch.loss_mask], found).items()}
        count, mean = sums["tokens"], sums["diff"] / sums["tokens"]
        cut = [ids[:512] for ids in whole[:MANY]]
        return {
            "start": f"{started:.0f} s",
            "tokens sampled, their mean -log p": f"{count:,.0f}, {-float(found.mean()):.3f}",
            "engine, tokens/s": f"{count / seconds:,.0f}",
            "trainer's log-probabilities, tokens/s": f"{batch.num_tokens / scored:,.0f}",
            "gap: mean": f"{mean:+.5f}",
            "gap: sd": f"{(sums['squares'] / count - mean**2) ** 0.5:.4f}",
            "gap: mean abs": f"{sums['abs'] / count:.5f}",
            "gap: k3": f"{sums['k3'] / count:.2e}",
            "gap: ratios outside [0.9, 1.1]": f"{100 * sums['outside'] / count:.2f} %",
            "gap: largest": f"{float((ours[batch.loss_mask] - found).abs().max()):.3f}",
            "engine, alone and among others": f"{await engine_variance(sampler, cut):.2e}",
            "trainer, alone and among others": f"{await trainer_variance(actor, cut):.2e}",
        }


async def engine_variance(sampler: Any, sequences: Sequence[Ids]) -> float:
    together = (await sampler.score(sequences))[:FEW]
    alone = [(await sampler.score([ids]))[0] for ids in sequences[:FEW]]
    return max(abs(a - b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True))


async def trainer_variance(actor: TrainerGroup, sequences: Sequence[Ids]) -> float:
    together = (await actor.score(sequences))[: sum(len(ids) for ids in sequences[:FEW])]
    alone = torch.cat([await actor.score([ids]) for ids in sequences[:FEW]])
    return float((together - alone).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--tokenizer", type=Path, default=os.environ.get("POSTTRAIN_GPU_TOKENIZER"))
    parser.add_argument("--data", type=Path, default=os.environ.get("POSTTRAIN_GPU_GSM8K"))
    parser.add_argument("--models", type=Path, default=Path("/tmp/posttrain-bench"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--modes", nargs="+", choices=["usual", "exact"], default=["usual", "exact"])
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: rollout.engine_options")
    args = parser.parse_args()
    args.model = trained_model(args.models / "0.5b-trained", args.tokenizer, args.data)
    found: dict[str, dict[str, Any]] = {}
    for mode in args.modes:
        with local_ray():
            found[mode] = asyncio.run(measure(args, mode == "exact"))
        print(f"{mode}: {json.dumps(found[mode])}", flush=True)
    table = Table("", *found, title=f"{args.engine}, {torch.cuda.get_device_name()}")
    for name in found[args.modes[0]]:
        table.add_row(name, *(of_mode[name] for of_mode in found.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
