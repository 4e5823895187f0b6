"""What this version does on a GPU: it learns with the tiny model; SFT and RL of a 0.5B shape are timed by phase.

    python scripts/bench_gpu.py --tokenizer DIR

DIR holds a Qwen tokenizer (vocab.json, merges.txt, tokenizer_config.json). Weights are random, in the shape of
Qwen2.5-0.5B: speed and agreement of trainer and engine do not depend on what the model knows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from qwen_shape import qwen_half_b
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from posttrain.config import Command


def make_model(tokenizer: Path, folder: Path) -> None:
    """A random model of Qwen2.5-0.5B's shape with the real tokenizer."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    config = qwen_half_b()
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def run_stage(command: Command, preset: str, sets: list[str], flags: dict[str, Any]) -> list[dict[str, float]]:
    """Run a training command; its metrics, a dict a step."""
    from posttrain.config.presets import resolve
    from posttrain.rl import command as rl
    from posttrain.sft import command as sft

    module = {"sft": sft, "rl": rl}[command]
    folder = module.run(resolve(command, preset, sets=sets, flags=flags))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median(steps: list[dict[str, float]], key: str, skip: int = 2) -> float:
    """Median over the steps after the first ones, which compile and allocate."""
    values = [step[key] for step in steps[skip:] if key in step]
    return statistics.median(values) if values else float("nan")


_BIG = ["train.tokens_per_microbatch=32768", "train.optim.lr=1e-5"]


def learn(common: dict[str, Any], out: Path) -> list[tuple[str, str]]:
    """SFT and RL of the tiny model: rows of the table."""
    data = out / "data"
    tiny = run_stage("sft", "tiny-arith-sft", [], common | {"data.train": str(data / "sft_train.parquet")})
    flags = common | {"data.train": str(data / "train.parquet"), "model.path": "run:tiny-arith-sft"}
    steps = run_stage("rl", "tiny-arith", [], flags)
    first, last = (statistics.fmean(s["critic/score/mean"] for s in part) for part in (steps[:5], steps[-5:]))
    return [
        ("tiny SFT, 900 steps: loss", f"{tiny[0]['train/loss']:.3f} -> {tiny[-1]['train/loss']:.3f}"),
        ("tiny RL, 40 steps: reward", f"{first:.3f} -> {last:.3f}"),
    ]


def measure_sft(common: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the rows of the table of SFT of the 0.5B shape."""
    flags = common | {"run.name": "sft-0.5b", "data.train": str(args.out / "data/sft_train.parquet")}
    steps = run_stage("sft", "tiny-arith-sft", [*_BIG, "data.batch_size=256", "data.max_length=1024"], flags)
    return [
        ("0.5B SFT, 256 conversations: tokens", f"{median(steps, 'train/tokens'):,.0f}"),
        ("0.5B SFT: tokens/s", f"{median(steps, 'perf/throughput'):,.0f}"),
        ("0.5B SFT: peak memory", f"{median(steps, 'perf/memory_gib'):.1f} GiB"),
    ]


def measure_rl(common: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the rows of the table of GRPO of the 0.5B shape, by phase."""
    lengths = ["rollout.max_prompt_tokens=512", "rollout.max_response_tokens=256", "rollout.memory_fraction=0.3"]
    flags = common | {"run.name": "rl-0.5b", "data.train": str(args.out / "data/train.parquet")}
    steps = run_stage("rl", "tiny-arith", [*_BIG, *lengths, "data.batch_size=32", "algo.kl_coef=0.001"], flags)
    phases = ("gen", "ref", "update_actor", "sync")
    return [
        *((f"0.5B RL, 256 episodes: {key}", f"{median(steps, f'timing_s/{key}'):.2f} s") for key in phases),
        ("0.5B RL, 256 episodes: tokens", f"{median(steps, 'perf/total_num_tokens'):,.0f}"),
        ("0.5B RL: update tokens/s", f"{median(steps, 'perf/throughput'):,.0f}"),
        ("0.5B RL: trainer-engine gap, mean |d|", f"{median(steps, 'rollout_gap/mean_abs'):.4f}"),
        ("0.5B RL: trainer-engine gap, outside 10 %", f"{median(steps, 'rollout_gap/outside'):.4f}"),
        ("0.5B RL: check gap after sync", f"{median(steps, 'sync/check_gap'):.4f}"),
        ("0.5B RL: peak memory of the trainer", f"{median(steps, 'perf/memory_gib'):.1f} GiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "posttrain_bench_gpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=["tiny", "sft", "rl"], default=["tiny", "sft", "rl"])
    args = parser.parse_args()
    from posttrain.cluster.cluster import local_ray
    from posttrain.prep import command as prep

    shutil.rmtree(args.out, ignore_errors=True)
    rows: list[tuple[str, str]] = [
        ("device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    ]
    prep.run("arith", out=str(args.out / "data"))
    common = {"run.dir": str(args.out / "runs"), "cluster.workers": args.workers}
    started = time.monotonic()
    with local_ray():
        if "tiny" in args.parts:
            rows += learn(common, args.out)
        if {"sft", "rl"} & set(args.parts):
            make_model(args.tokenizer, args.out / "model")
        big = common | {"model.path": str(args.out / "model"), "train.steps": args.steps}
        if "sft" in args.parts:
            rows += measure_sft(big, args)
        if "rl" in args.parts:
            rows += measure_rl(big, args)
    rows.append(("all runs", f"{time.monotonic() - started:.0f} s"))
    table = Table("what", "measured")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
