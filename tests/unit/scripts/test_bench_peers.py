"""The comparison with other systems: what it reads of them, and a whole run beside TRL."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return load("bench_peers")


@pytest.fixture(scope="module")
def task():
    return load("bench_peers_task")


def test_the_reward_is_the_last_number_or_the_share_of_letters(task):
    assert task.compute_score("gsm8k", "3 apples, so 1,200 apples.", "1200", {}) == 1.0
    assert task.compute_score("gsm8k", "1200 and then 7", "1200") == 0.0
    assert task.compute_score("gsm8k", "none", "1200") == 0.0
    assert task.compute_score("letters", "12ab", "1") == 0.5
    assert task.compute_score("letters", "", "1") == 0.0


def test_the_calculator_computes_and_runs_no_code(task):
    assert task.calculator("(3 + 4) * 2.5 - -1") == "18.5"
    assert task.calculator("7/4") == "1.75"
    for bad in ("1 / 0", "__import__('os')", "2 ** 9", "1 +", "x"):
        assert task.calculator(bad).startswith("error: ")


def test_steps_are_read_from_verls_console(bench):
    line = (
        "(TaskRunner pid=7) step:2 - critic/score/mean:0.25 - response_length/mean:np.float64(31.5) - "
        "perf/total_num_tokens:4096 - timing_s/gen:1.5 - timing_s/old_log_prob:0.25 - timing_s/update_actor:2.0 - "
        "timing_s/update_weights:1e-01 - timing_s/step:4.5 - num_turns/mean:np.float64(3.0)\n"
    )
    assert bench.read_verl({}, [(9.0, "starts\n"), (10.0, line), (11.0, "step:3 - val/acc:0.5\n")]) == [
        {"step": 2, "at": 10.0, "seconds": 4.5, "rollout": 1.5, "logprobs": 0.25, "update": 2.0, "weights": 0.1,
         "reward": 0.25, "length": 31.5, "tokens": 4096.0, "calls": 0.5}
    ]  # fmt: skip


def test_verls_attention_is_given_lengths_that_are_numbers(monkeypatch):
    from transformers import modeling_flash_attention_utils as flash

    monkeypatch.setattr(flash, "prepare_fa_kwargs_from_position_ids", flash.prepare_fa_kwargs_from_position_ids)
    load("bench_peers_verl")
    (offsets, _), lengths = flash.prepare_fa_kwargs_from_position_ids(torch.tensor([[0, 1, 2, 0, 1]]))
    assert offsets.tolist() == [0, 3, 5]
    assert lengths == (3, 3)
    assert [type(length) for length in lengths] == [int, int]


def test_the_table_has_medians_after_the_first_step_and_says_what_failed(bench):
    def step(seconds):
        parts = {"rollout": seconds / 2, "logprobs": 0.0, "update": seconds / 4, "weights": 0.0}
        means = {"reward": 0.5, "length": 3.0, "calls": 0.25}
        return parts | means | {"seconds": seconds, "tokens": 1000.0, "first_s": 40.0 + seconds}

    done = {"system": "trl", "seed": 1, "steps": [step(100.0), step(2.0), step(4.0)], "memory_gib": 2.5}
    failed = {"system": "verl", "seed": 1, "failed": "exit code 1, see log.txt"}
    text = bench.table([done, failed, done | {"system": "posttrain", "failed": "exit code -9 after 3 steps"}])
    assert "| trl | 1 | 3 | 1.5 | 0 | 0.75 | 0 | 0.75 | 375 | 2.5 | 140 |" in text
    assert "| verl | 1 | exit code 1, see log.txt |" in text
    assert "trl, seed 1, reward: 0.5 0.5 0.5" in text
    assert "trl, seed 1, calls: 0.25 0.25 0.25" in text
    assert "| posttrain | 1 | exit code -9 after 3 steps |" in text
    assert "| posttrain | 1 | 3 | 1.5 |" in text


def test_all_systems_are_told_the_same(bench, tmp_path):
    """Every value of the work that a system has a setting for is in its command."""
    job = bench.DEFAULTS | bench.WORKS["d"] | {
        "model": "m", "parquet": "p", "out": str(tmp_path), "seed": 3, "steps": 7, "gpu": True, "lora_rank": 16
    }  # fmt: skip
    args = type("Args", (), {"posttrain_set": [], "verl_set": []})()
    for system in bench.COMMANDS:
        setattr(args, f"python_{system}", "python")
    ours, verl = bench.posttrain_command(job, args), bench.verl_command(job, args)
    for ours_key, verl_key in {
        "data.batch_size": "data.train_batch_size",
        "rollout.n": "actor_rollout_ref.rollout.n",
        "rollout.max_response_tokens": "data.max_response_length",
        "rollout.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
        "train.optim.lr": "actor_rollout_ref.actor.optim.lr",
        "train.steps": "trainer.total_training_steps",
        "train.lora.rank": "actor_rollout_ref.model.lora_rank",
        "train.tokens_per_microbatch": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    }.items():
        (value,) = [part.split("=", 2)[2] for part in ours if part.startswith(f"--set={ours_key}=")]
        assert f"{verl_key}={value}" in verl
    for setting in ("tensor_model_parallel_size=1", "max_num_seqs=1024", "max_model_len=1280"):
        assert f"actor_rollout_ref.rollout.{setting}" in verl  # verl's defaults are 2, 256 and the model's
    assert json.loads(Path(bench.trl_command(job, args)[-1]).read_text()) == job


RUN_AND_FAIL = r"""
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("bench_peers", sys.argv[1])
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
bench.adopt_orphans()
system = [sys.executable, "-c", sys.argv[3]]
for end, limit in (("exit", 60.0), ("hang", 5.0), ("end", 60.0)):
    bench.COMMANDS["trl"] = lambda job, args: [*system, end]
    args = type("Args", (), {"trl_env": [], "limit": limit})()
    job = {"out": sys.argv[2] + "/" + end, "gpu": False, "seed": 0, "turns": 3}
    result = bench.run("trl", job, args)
    print(json.dumps([result, bench.descendants(os.getpid())]))
"""

STEPS_THEN_FAILS = r"""
import subprocess, sys
orphan = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan])
calls = 0.0 if sys.argv[1] == "end" else 0.5
print(f'{{"step": 1, "at": 0.0, "seconds": 1.0, "calls": {calls}}}', flush=True)
if sys.argv[1] == "end":
    sys.exit()
if sys.argv[1] == "hang":
    subprocess.run(["sleep", "600"])
sys.exit(3)
"""


def test_a_system_that_fails_keeps_its_steps_and_leaves_no_process(tmp_path):
    """In a process of its own, since a run ends all that its process has started."""
    command = [sys.executable, "-c", RUN_AND_FAIL, str(SCRIPTS / "bench_peers.py"), str(tmp_path), STEPS_THEN_FAILS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (exited, left), (hung, left_of_hung), (ended, _) = map(json.loads, done.stdout.splitlines())
    assert left == left_of_hung == []
    assert ended["failed"] == "no tool call in 1 steps: --model is none that calls tools"
    assert exited["failed"].startswith("exit code 3 after 1 steps")
    assert hung["failed"].startswith("exit code -9 after 1 steps")
    assert [step["step"] for step in exited["steps"] + hung["steps"]] == [1, 1]


@pytest.mark.slow
def test_a_small_comparison_with_trl_runs(tmp_path):
    python = os.environ.get("POSTTRAIN_PYTHON_TRL", sys.executable)
    if subprocess.run([python, "-c", "import trl"], capture_output=True, check=False).returncode:
        pytest.skip(f"trl is not installed for {python} (POSTTRAIN_PYTHON_TRL names another interpreter)")
    small = '{"prompts": 4, "n": 2, "response": 8, "trl_rows": 8}'
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_peers.py"), "posttrain", "trl", "--steps", "2", "--change", small,
         "--python-trl", python, "--out", str(tmp_path), "--limit", "1200"],
        capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["system"] for result in results] == ["posttrain", "trl"]
    for result in results:
        assert [step["step"] for step in result["steps"]] == [1, 2]
        assert result["memory_gib"] > 0.1
        for step in result["steps"]:
            assert 0 < step["rollout"] < step["seconds"]
            assert 0 < step["update"] < step["seconds"]
            assert 0 < step["length"] <= 8
            assert 0.0 <= step["reward"] <= 1.0
    ours, trl = ([step["tokens"] for step in result["steps"]] for result in results)
    lengths = [[step["length"] for step in result["steps"]] for result in results]
    # The same prompts in the same template: what is not the response is as long.
    assert ours[0] - 8 * lengths[0][0] == pytest.approx(trl[0] - 8 * lengths[1][0])
    assert "| trl | 0 |" in done.stdout
