"""What this version does on one GPU: kernels checked, then SFT and RL of a 0.5B shape, timed by phase.

    python scripts/bench_gpu.py --tokenizer DIR

DIR holds a Qwen tokenizer (vocab.json, merges.txt, tokenizer_config.json). Weights are random, in the shape of
Qwen2.5-0.5B: speed and agreement of trainer and engine do not depend on what the model knows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from qwen_shape import qwen_half_b
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from posttrain.config import Command


def check_attention() -> dict[str, float]:
    """Largest absolute difference of packed varlen attention to float32 SDPA, values and gradients, in bf16."""
    from posttrain.models.attention import Ragged, ragged_attention

    torch.manual_seed(0)
    lengths = [1, 17, 128, 700, 33]
    total, heads, kv_heads, size = sum(lengths), 14, 2, 64
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    device, dtype = torch.device("cuda"), torch.bfloat16
    q, k, v = (torch.randn(1, h, total, size, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ragged = Ragged.build(offsets, device, dtype)
    out, _ = ragged_attention(torch.nn.Module(), q, k, v, None, scaling=size**-0.5, ragged=ragged)
    out.float().square().sum().backward()
    found = [out.detach().float(), *(x.grad.float() for x in inputs if x.grad is not None)]

    exact = [x.detach().float().requires_grad_() for x in inputs]
    parts = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = [x[:, :, start:end] for x in exact]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True))
    reference = torch.cat(parts, dim=2).transpose(1, 2)
    reference.square().sum().backward()
    expected = [reference.detach(), *(x.grad for x in exact if x.grad is not None)]
    names = ("output", "query gradient", "key gradient", "value gradient")
    return {n: float((a - b).abs().max() / b.abs().max()) for n, a, b in zip(names, found, expected, strict=True)}


def make_model(tokenizer: Path, folder: Path) -> None:
    """A random model of Qwen2.5-0.5B's shape with the real tokenizer."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    config = qwen_half_b()
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def run_stage(command: Command, preset: str, sets: list[str], flags: dict[str, Any]) -> list[dict[str, float]]:
    """Run a training command; its metrics, a dict a step."""
    from posttrain import rl, sft
    from posttrain.presets import resolve

    module = {"sft": sft, "rl": rl}[command]
    folder = module.run(resolve(command, preset, sets=sets, flags=flags))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median(steps: list[dict[str, float]], key: str, skip: int = 2) -> float:
    """Median over the steps after the first ones, which compile and allocate."""
    values = [step[key] for step in steps[skip:] if key in step]
    return statistics.median(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("/tmp/posttrain_bench_gpu"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    from posttrain import prep
    from posttrain.cluster.cluster import local_ray

    shutil.rmtree(args.out, ignore_errors=True)
    rows: list[tuple[str, str]] = [
        ("device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    ]
    rows += [(f"attention, {name}: relative to float32", f"{gap:.2e}") for name, gap in check_attention().items()]
    make_model(args.tokenizer, args.out / "model")
    prep.run("arith", out=str(args.out / "data"))
    common = {"run.dir": str(args.out / "runs"), "cluster.workers": args.workers}
    started = time.monotonic()
    with local_ray():
        tiny = run_stage("sft", "tiny-arith-sft", [], common | {"data.train": str(args.out / "data/sft_train.parquet")})
        rows.append(("tiny SFT, 900 steps: loss", f"{tiny[0]['train/loss']:.3f} -> {tiny[-1]['train/loss']:.3f}"))
        flags = common | {"data.train": str(args.out / "data/train.parquet")}
        steps = run_stage("rl", "tiny-arith", [], flags | {"model.path": "run:tiny-arith-sft"})
        first, last = (statistics.fmean(s["critic/score/mean"] for s in part) for part in (steps[:5], steps[-5:]))
        rows.append(("tiny RL, 40 steps: reward", f"{first:.3f} -> {last:.3f}"))
        big = common | {"model.path": str(args.out / "model"), "train.steps": args.steps}
        sets = ["data.batch_size=256", "train.tokens_per_microbatch=32768", "train.optim.lr=1e-5"]
        flags = big | {"run.name": "sft-0.5b", "data.train": str(args.out / "data/sft_train.parquet")}
        steps = run_stage("sft", "tiny-arith-sft", [*sets, "data.max_length=1024"], flags)
        rows.append(("0.5B SFT: tokens/s", f"{median(steps, 'perf/throughput'):,.0f}"))
        rows.append(("0.5B SFT: peak memory", f"{median(steps, 'perf/memory_gib'):.1f} GiB"))
        sets += ["rollout.max_prompt_tokens=512", "rollout.max_response_tokens=256", "rollout.memory_fraction=0.3"]
        sets += ["data.batch_size=32", "algo.kl_coef=0.001"]
        flags = big | {"run.name": "rl-0.5b", "data.train": str(args.out / "data/train.parquet")}
        steps = run_stage("rl", "tiny-arith", sets, flags)
    for key in ("gen", "ref", "update_actor", "sync"):
        rows.append((f"0.5B RL, 256 episodes: {key}", f"{median(steps, f'timing_s/{key}'):.2f} s"))
    rows.append(("0.5B RL: update tokens/s", f"{median(steps, 'perf/throughput'):,.0f}"))
    rows.append(("0.5B RL: trainer-engine gap, mean |d|", f"{median(steps, 'rollout_gap/mean_abs'):.4f}"))
    rows.append(("0.5B RL: trainer-engine gap, outside 10 %", f"{median(steps, 'rollout_gap/outside'):.4f}"))
    rows.append(("0.5B RL: canary gap after sync", f"{median(steps, 'sync/canary_gap'):.4f}"))
    rows.append(("0.5B RL: peak memory of the trainer", f"{median(steps, 'perf/memory_gib'):.1f} GiB"))
    rows.append(("all runs", f"{time.monotonic() - started:.0f} s"))
    table = Table("what", "measured")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
