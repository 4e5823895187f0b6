"""`posttrain rl` on a GPU in the shape of Qwen2.5-0.5B: PPO with a critic, GRPO with a KL to a reference, LoRA.

Random weights under the real tokenizer, so that episodes are long and rewards are noise; what is looked at is that
phases fit into memory and take their time, that trainer and engine agree, and that weights move. Needs
`POSTTRAIN_GPU_TOKENIZER` (a tokenizer's folder). Each test prints a line for docs/benchmarks.md.
"""

import json
import math
import os
import statistics
import subprocess
import sys

import pytest
import torch

from posttrain.data.parquet import write_rows
from tests.gpu.models import HALF_B, write_model

TOKENIZER = os.environ.get("POSTTRAIN_GPU_TOKENIZER", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not TOKENIZER, reason="needs POSTTRAIN_GPU_TOKENIZER"),
]
PLUGIN = """
import zlib

from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.core.types import Score

DATA_SOURCES["test/any"] = "any"

@GRADERS.register("any")
@cheap
def grade(response, ground_truth, extra_info):
    score = float(zlib.crc32(response.encode()) % 4)
    return Score(score, score >= 2)
"""
STEPS = 4
RUNS = {
    "PPO, critic, KL in the reward": [
        "algo.name=ppo", "algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_estimator=k1", "critic.optim.lr=1e-5",
    ],
    "GRPO, KL to a reference": ["algo.name=grpo", "algo.kl_coef=0.01"],
    "GRPO, KL, offloaded between phases": ["algo.name=grpo", "algo.kl_coef=0.01", "train.offload=true"],
    "GSPO, two updates": ["algo.name=gspo", "algo.updates_per_step=2"],
    "LoRA, KL to its base": ["algo.name=grpo", "algo.kl_coef=0.01", "train.lora.rank=16", "train.optim.lr=1e-4"],
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a model, prompts and a grader."""
    folder = tmp_path_factory.mktemp("rl")
    write_model(folder / "model", HALF_B, tokenizer=TOKENIZER)
    rows = [
        {
            "data_source": "test/any",
            "prompt": [{"role": "user", "content": f"Write {i} lines."}],
            "reward_model": {"style": "rule", "ground_truth": "8"},
        }
        for i in range(64)
    ]
    write_rows(folder / "train.parquet", rows)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_says_what_it_took(here, tmp_path, name):
    settings = {
        "model.path": here / "model", "data.train": here / "train.parquet", "data.batch_size": 16, "rollout.n": 8,
        "rollout.max_response_tokens": 256, "rollout.memory_fraction": 0.2, "rollout.tools": "[]", "run.dir": tmp_path,
        "run.name": "gpu", "train.steps": STEPS, "train.tokens_per_microbatch": 16384, "train.optim.lr": 1e-6,
        "train.optim.warmup_ratio": 0.0, "cluster.step_deadline_s": 200, "plugins": f"['{here / 'plugin.py'}']",
    }  # fmt: skip
    command = [sys.executable, "-m", "posttrain", "rl", "--preset", "tiny-arith"]
    for setting in [*(f"{key}={value}" for key, value in settings.items()), *RUNS[name]]:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert all(isinstance(v, int | float) and math.isfinite(v) for m in metrics for v in m.values())
    later = metrics[2:]  # the first two compile and grow memory
    phases = sorted({k for m in later for k in m if k.startswith("timing_s/")} - {"timing_s/step"})
    timings = {k.removeprefix("timing_s/"): statistics.median(m.get(k, 0.0) for m in later) for k in phases}
    shown = ", ".join(f"{k} {v:.2f}" for k, v in timings.items() if v >= 0.01)
    memory, gap = later[-1]["perf/memory_gib"], later[-1]["rollout_gap/mean_abs"]
    print(f"\n| {name} | {shown} | {memory:.1f} GiB | {gap:.4f} |")
    assert metrics[-1]["rollout_gap/mean_abs"] < 0.05
    assert all(m["actor/grad_norm"] > 0 for m in metrics)
    if "critic" in name:
        assert metrics[-1]["critic/values/max"] > metrics[-1]["critic/values/min"]
