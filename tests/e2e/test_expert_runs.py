"""Whole runs of a mixture of experts on two workers that share out its experts: from questions to a merged model."""

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from tests.e2e.run_commands import run_commands

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
SHARED_OUT = ["--set", "cluster.device='cpu'", "--set", "cluster.workers=2", "--set", "train.expert_parallel=2"]
RL = [*SHARED_OUT, "--set", "data.batch_size=4", "--set", "rollout.n=3", "--set", "rollout.max_response_tokens=24"]
SHORTER = {
    "prep": ["--train-rows", "40", "--test-rows", "6"],
    "sft": [*SHARED_OUT, "--steps", "20"],
    "rl": [*RL, "--steps", "2", "--set", "algo.updates_per_step=2"],
    "generate": ["--limit", "4", "--set", "rollout.max_response_tokens=24"],
    "merge-ckpt": ["--check"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The commands of docs/experts.md on few rows, and training on the rollouts that they wrote."""
    folder = tmp_path_factory.mktemp("experts")
    page = (REPO / "docs" / "experts.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    guide = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    again = "rl --preset tiny-arith --model run:moe-sft --replay runs/moe-rl/rollouts --name again --steps 1"
    commands = [*([*words, *SHORTER[words[0]]] for words in guide)]
    commands.append([*again.split(), "--set", "rollout.router_replay=R3", *SHARED_OUT])
    dense = "rl --preset tiny-arith --model run:moe-sft --algo ppo --set critic.path=builtin:tiny --name ppo --steps 1"
    commands.append([*dense.split(), "--set", "train.router_aux_loss_coef=0.01"])
    commands[-1] += ["--set", "reward.weights.length=1.0", *RL]  # of few episodes none may have another reward
    run_commands(folder, commands)
    return folder


def metrics(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_of_the_guide(folder):
    rows = metrics(folder, "moe-sft")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 2.0
    assert all(2.0 <= row["moe/aux_loss"] < 4.0 and row["moe/busiest_expert"] >= 0.25 for row in rows)
    assert "moe/replay_agreement" not in rows[0]
    assert pq.read_table(folder / "runs" / "moe-generate" / "responses.parquet").num_rows == 4


def test_the_critic_of_a_mixture_may_be_dense(folder):
    [row] = [row for row in metrics(folder, "ppo") if "critic/vf_loss" in row]
    assert row["actor/grad_norm"] > 0.0
    assert row["critic/grad_norm"] > 0.0


@pytest.mark.parametrize(("name", "steps"), [("moe-rl", [1, 2]), ("again", [1])])
def test_rl_trains_with_the_experts_of_the_engine(folder, name, steps):
    rows = [row for row in metrics(folder, name) if "rollout_gap/mean_abs" in row]
    assert [row["step"] for row in rows] == steps
    for row in rows:
        assert row["moe/replay_bytes_per_token"] == 4  # 2 layers, 2 experts
        assert row["moe/replay_agreement"] > 0.9
        assert row["moe/aux_loss"] >= 2.0
        assert row["rollout_gap/mean_abs"] < 1e-3


def test_rollout_files_have_the_experts_of_all_tokens_but_the_last(folder):
    table = pq.read_table(folder / "runs" / "moe-rl" / "rollouts" / "step_000001.parquet")
    assert table.num_rows == 12
    for tokens, routing in zip(table["tokens"].to_pylist(), table["routing"].to_pylist(), strict=True):
        assert len(routing) == 4 * len(tokens)
        assert all(1 <= expert <= 8 for expert in routing[:-4])
        assert routing[-4:] == [0] * 4


def test_the_merged_mixture_is_loaded_by_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_018_624
