"""The commands as a person runs them, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MINUTE = 60.0


def posttrain(cwd: Path, *arguments: str, timeout: float = 5 * MINUTE) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd``; PYTHONPATH makes this checkout importable there and in the workers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-m", "posttrain", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def ok(cwd: Path, *arguments: str, timeout: float = 5 * MINUTE) -> subprocess.CompletedProcess[str]:
    done = posttrain(cwd, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def refused(cwd: Path, *arguments: str) -> str:
    """Stderr of a command that must end as bad input: code 2, one message, a hint, no traceback."""
    done = posttrain(cwd, *arguments)
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the JSON line of one quickstart run."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = ok(folder, "quickstart", "--seed", "0", "--json", timeout=15 * MINUTE)
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quickstart_rl_beats_sft(quickstart: tuple[Path, dict[str, object]]) -> None:
    folder, result = quickstart
    stages = result["stages"]
    assert isinstance(stages, dict)
    assert set(stages) == {"base", "sft", "rl"}
    assert stages["rl"]["pass@1"] - stages["sft"]["pass@1"] >= 0.25
    assert stages["base"]["pass@1"] < 0.05 < stages["sft"]["pass@1"]
    assert all(0.0 <= s["pass@1"] <= s["pass@5"] <= 1.0 for s in stages.values())
    assert (folder / str(result["merged"]) / "model.safetensors").is_file()
    train, test = (
        {
            row[0]["content"]
            for row in pq.read_table(folder / f"runs/quickstart/data/{name}.parquet")["prompt"].to_pylist()
        }
        for name in ("train", "test")
    )
    assert len(test) == 200
    assert not train & test


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_merged_folder_decodes_as_the_checkpoint(quickstart: tuple[Path, dict[str, object]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.data.chat import render_prompt
    from posttrain.data.parquet import read_prompts
    from posttrain.tools.gsm8k import SCHEMA

    folder, result = quickstart
    runs = folder / "runs/quickstart"
    ok(
        runs,
        *("generate", "--preset", "tiny-arith-generate", "--data", "data/test.parquet", "--out", "greedy.parquet"),
        *("--n", "1", "--temperature", "0", "--set", "rollout.max_turns=1"),
        *("--model", f"rl/checkpoints/{(runs / 'rl/checkpoints/latest').read_text()}"),
    )
    ours = pq.read_table(runs / "greedy.parquet")["response_ids"].to_pylist()
    model = AutoModelForCausalLM.from_pretrained(folder / str(result["merged"]))
    tokenizer = AutoTokenizer.from_pretrained(folder / str(result["merged"]))
    prompts = read_prompts(runs / "data/test.parquet")
    assert len(prompts) == len(ours) == 200
    for prompt, (expected,) in zip(prompts, ours, strict=True):
        ids = torch.tensor([render_prompt(prompt.messages, tokenizer, [SCHEMA])])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=96)
        assert out[0, ids.shape[1] :].tolist() == expected


def test_gsm8k_sequence(tmp_path: Path, test_data: Path) -> None:
    """The README's commands on real GSM8K, shortened by flags."""
    prepared = ok(tmp_path, "prep", "gsm8k", "--source", str(test_data / "gsm8k"))
    assert "data/gsm8k/train.parquet  7473 rows" in prepared.stdout
    assert "data/gsm8k/test.parquet  1319 rows" in prepared.stdout
    ok(tmp_path, "sft", "--preset", "tiny-multiturn", "--steps", "3")
    ok(tmp_path, "rl", "--algo", "grpo", "--tools", "gsm8k", "--steps", "2", "--set", "rollout.max_response_tokens=64")
    done = ok(tmp_path, "generate", "--limit", "8", "--set", "rollout.max_response_tokens=64")
    assert "no GPU found: using preset tiny-generate" in done.stderr
    report = json.loads(ok(tmp_path, "eval", "--pass-at", "5", "--json").stdout)
    assert report["overall"]["problems"] == 8
    assert report["n"] == 5
    ok(tmp_path, "merge-ckpt", "tiny-gsm8k", "--out", "merged")
    assert (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gsm8k_sequence_exactly(tmp_path: Path, test_data: Path) -> None:
    ok(tmp_path, "prep", "gsm8k", "--source", str(test_data / "gsm8k"))
    for command in ("sft --preset tiny-multiturn", "rl --algo grpo --tools gsm8k", "generate", "eval --pass-at 5"):
        ok(tmp_path, *command.split(), timeout=10 * MINUTE)


@pytest.fixture(scope="module")
def arith(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with generated data."""
    folder = tmp_path_factory.mktemp("arith")
    ok(folder, "prep", "arith", "--train-rows", "100", "--test-rows", "20")
    return folder


def test_bad_input_ends_with_2_and_leaves_nothing(arith: Path) -> None:
    before = sorted(arith.rglob("*"))
    assert "data/none.parquet" in refused(arith, "sft", "--preset", "tiny-arith-sft", "--data", "data/none.parquet")
    assert "messages" in refused(arith, "sft", "--preset", "tiny-arith-sft", "--data", "data/arith/train.parquet")
    broken = arith / "broken.parquet"
    broken.write_bytes((arith / "data/arith/train.parquet").read_bytes()[:2000])
    assert "broken.parquet" in refused(
        arith, "rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--data", "broken.parquet"
    )
    broken.unlink()
    assert "divisible" in refused(arith, "sft", "--preset", "tiny-arith-sft", "--workers", "3")
    assert "row 0" in refused(
        arith, "rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--set", "rollout.max_prompt_tokens=10"
    )
    assert "tiny-arith-sft" in refused(arith, "sft", "--preset", "tiny-arith-sfd")
    assert "train.steps" in refused(arith, "sft", "--preset", "tiny-arith-sft", "--set", "train.step=3")
    assert "gsm8k" in refused(arith, "rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--tools", "gsm8")
    assert "grpo" in refused(arith, "rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--algo", "grop")
    assert "run 'tiny-arith-sft'" in refused(arith, "rl", "--preset", "tiny-arith")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in refused(
        arith, "sft", "--preset", "qwen2.5-0.5b-multiturn", "--data", "x.parquet"
    )
    assert "exist" in refused(arith, "prep", "arith")
    assert sorted(arith.rglob("*")) == before


def wait_for(process: subprocess.Popen[str], text: str, seconds: float) -> None:
    """Read stderr lines until one holds ``text``."""
    assert process.stderr is not None
    end = time.monotonic() + seconds
    seen: list[str] = []
    while time.monotonic() < end and (line := process.stderr.readline()):
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["sft", "--preset", "tiny-arith-sft", "--steps", "2000"], "tiny-arith-sft"),
        (["rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--steps", "500"], "tiny-arith"),
    ],
)
def test_ctrl_c_saves_and_the_same_command_goes_on(arith: Path, command: Sequence[str], name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *command], cwd=arith, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, "step 2/", 120)
    workers = descendants(process.pid)
    assert len(workers) > 3
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert time.monotonic() - sent < 10.0
    assert process.returncode == 130
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() - sent < 10.0:
        time.sleep(0.1)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
    run = arith / "runs" / name
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    saved = int(re.sub(r"\D", "", (run / "checkpoints/latest").read_text()))
    assert saved >= 2
    done = ok(arith, *command[:-1], str(saved + 2))
    assert f"resuming after step {saved}" in done.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, saved + 3))


def descendants(pid: int) -> set[int]:
    """Process ids of all children of a process, and of theirs."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found |= {child} | descendants(child)
    return found
