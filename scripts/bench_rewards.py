"""Rewards on a GPU: a reward model checked and timed, `rl` with it and with offload, and whether programs are isolated.

    python scripts/bench_rewards.py --tokenizer DIR

DIR holds a Qwen tokenizer (vocab.json, merges.txt, tokenizer_config.json). Weights are random, in the shape of
Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from qwen_shape import qwen_half_b
from rich.console import Console
from rich.table import Table

from posttrain.config import SandboxConfig
from posttrain.core.types import Message

PEAK_FLOPS = 989e12
"""Dense bf16 of an H200, by its datasheet."""


def make_models(tokenizer: Path, out: Path) -> int:
    """A policy and a reward model with random weights; the number of the latter's matrix parameters."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    shape = qwen_half_b()
    torch.manual_seed(0)
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(out / "policy")
    tokens.save_pretrained(out / "policy")
    shape.num_labels = 1
    model = Qwen2ForSequenceClassification(shape).to(torch.bfloat16)
    model.save_pretrained(out / "reward")
    tokens.save_pretrained(out / "reward")
    return sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)


def conversations(count: int, words: int) -> list[list[Message]]:
    text = "the quick brown fox jumps over the lazy dog and asks for "
    return [
        [
            {"role": "user", "content": f"Problem {i}: what is {i} + 1?"},
            {"role": "assistant", "content": text * (words // 11) + str(i + 1)},
        ]
        for i in range(count)
    ]


def check_reward_model(folder: Path, parameters: int) -> list[tuple[str, str]]:
    """bf16 on the GPU against float32 on the CPU, and the speed of a large batch."""
    from posttrain.models.reward import RewardModel

    def load(device: str, dtype: torch.dtype) -> RewardModel:
        return RewardModel(str(folder), device, dtype, max_length=4096, tokens_per_batch=65536)

    few = conversations(8, 60)
    exact = [s.score for s in load("cpu", torch.float32).score(few)]
    model = load("cuda", torch.bfloat16)
    found = [s.score for s in model.score(few)]
    alone = [model.score([c])[0].score for c in few]
    many = conversations(512, 400)
    model.score(many[:64])
    torch.cuda.synchronize()
    started = time.perf_counter()
    scores = model.score(many)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert all(s.error is None for s in scores)
    tokens = sum(len(model.tokenizer.apply_chat_template(c, return_dict=False)) for c in many)
    gap = max(abs(a - b) for a, b in zip(found, exact, strict=True))
    spread = max(exact) - min(exact)
    return [
        ("reward model, bf16 GPU against float32 CPU: largest difference", f"{gap:.4f} (scores span {spread:.3f})"),
        ("reward model, batch against one by one", f"{max(abs(a - b) for a, b in zip(found, alone, strict=True)):.4f}"),
        (f"reward model, {len(many)} conversations, {tokens:,} tokens", f"{tokens / seconds:,.0f} tokens/s"),
        ("  of the GPU's peak (2 x parameters x tokens)", f"{2 * parameters * tokens / seconds / PEAK_FLOPS:.1%}"),
    ]


def run_rl(out: Path, name: str, *sets: str) -> list[dict[str, float]]:
    from posttrain.config.presets import resolve
    from posttrain.rl import command as rl

    always = [
        "train.optim.lr=1e-5",
        "train.tokens_per_microbatch=32768",
        "rollout.max_prompt_tokens=512",
        "rollout.max_response_tokens=256",
        "rollout.memory_fraction=0.2",
        "data.batch_size=16",
        "algo.kl_coef=0.001",
        "reward.weights={score=1.0, format=0.1, model=0.5}",
        f"reward.model.path='{out / 'reward'}'",
    ]
    flags = {"run.dir": str(out / "runs"), "run.name": name, "model.path": str(out / "policy"), "train.steps": 4}
    flags |= {"data.train": str(out / "data/train.parquet")}
    folder = rl.run(resolve("rl", "tiny-arith", sets=[*always, *sets], flags=flags))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def isolation() -> str:
    from posttrain.sandbox import SandboxUnavailable, open_sandbox

    try:
        sandbox = open_sandbox(SandboxConfig())
    except SandboxUnavailable as error:
        sandbox = open_sandbox(SandboxConfig(allow_unisolated=True))
        result = sandbox.run("print(6 * 7)")
        sandbox.close()
        return f"none ({error.message}); unisolated: {result.status} {result.stdout.strip()}"
    times = []
    for _ in range(50):
        started = time.perf_counter()
        sandbox.run("pass")
        times.append(1000 * (time.perf_counter() - started))
    sandbox.close()
    return f"isolated, {statistics.median(times):.2f} ms a program"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("/tmp/posttrain_bench_rewards"))
    args = parser.parse_args()
    from posttrain.cluster.cluster import local_ray
    from posttrain.prep import command as prep

    shutil.rmtree(args.out, ignore_errors=True)
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    rows = [("device", device), ("programs", isolation())]
    parameters = make_models(args.tokenizer, args.out)
    rows += check_reward_model(args.out / "reward", parameters)
    torch.cuda.empty_cache()
    prep.run("arith", out=str(args.out / "data"))
    with local_ray():
        for name, sets in {"plain": [], "offload": ["train.offload=true"]}.items():
            steps = run_rl(args.out, name, *sets)
            last = steps[-1]
            parts = {p: last[f"reward/{p}/mean"] for p in ("score", "format", "model")}
            total = parts["score"] + 0.1 * parts["format"] + 0.5 * parts["model"]
            assert abs(last["critic/score/mean"] - total) < 1e-4, (parts, last["critic/score/mean"])
            assert all(step["rollout/grader_failed"] == 0 for step in steps)
            what = f"0.5B rl with a 0.5B reward model, {name}"
            rows.append((f"{what}: reward", f"{last['critic/score/mean']:.4f}, of it the model {parts['model']:.4f}"))
            for key in ("gen", "ref", "update_actor", "sync"):
                rows.append((f"{what}: {key}", f"{last[f'timing_s/{key}']:.2f} s"))
            rows.append((f"{what}: check gap after sync", f"{last['sync/check_gap']:.4f}"))
            rows.append((f"{what}: trainer's peak memory", f"{last['perf/memory_gib']:.1f} GiB"))
    table = Table("what", "measured")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
