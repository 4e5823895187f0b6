"""The commands as a person runs them: those that are stopped, and the quickstart, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.cluster.cluster import local_ray
from tests.browser.pages import drawn, opened
from tests.helpers.commands import invoke, succeed

ROOT = Path(__file__).resolve().parents[2]
MINUTE = 60.0


def posttrain(
    cwd: Path, *arguments: str, timeout: float = 5 * MINUTE, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd``; PYTHONPATH makes this checkout importable there and in the workers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [python, "-m", "posttrain", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def ok(
    cwd: Path, *arguments: str, timeout: float = 5 * MINUTE, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    done = posttrain(cwd, *arguments, timeout=timeout, python=python)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def refused(cwd: Path, *arguments: str) -> str:
    """Return stderr of a command that must end as bad input: code 2, one message, a hint, no traceback."""
    done = invoke(cwd, *arguments)
    assert done.exit_code == 2, (done.exit_code, done.stderr[-2000:])
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder and the JSON line of one quickstart run."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = ok(folder, "quickstart", "--seed", "0", "--json", timeout=25 * MINUTE)
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
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
@pytest.mark.timeout(1800)
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


@pytest.fixture(scope="module")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, which scripts/test_vllm makes."""
    python = Path(os.environ.get("POSTTRAIN_VLLM_VENV") or ROOT / ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no vLLM: {python} is not there (make it with scripts/test_vllm)")
    return str(python)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rl_with_vllm_learns(quickstart: tuple[Path, dict[str, object]], vllm_python: str) -> None:
    """The quickstart's RL again with fewer steps, from the same model and on the same prompts."""
    folder, result = quickstart
    runs = folder / "runs/quickstart"
    command = ("rl", "--preset", "tiny-arith", "--data", "data/train.parquet", "--model", "run:sft", "--name", "vllm")
    sets = ("--steps", "16", "--set", "run.dir=.", "--set", "rollout.engine=vllm")
    ok(runs, *command, *sets, timeout=15 * MINUTE, python=vllm_python)
    steps = [json.loads(line) for line in (runs / "vllm/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 17))
    assert all(step["sync/check_gap"] < 1e-4 for step in steps)
    assert all(step["rollout_gap/mean_abs"] < 1e-4 for step in steps)
    assert all(step["rollout/failed"] == 0 for step in steps)
    # How far a run gets depends on its samples, of either engine: from 0.40, ten of eleven came to 0.65 to 0.72 in 24
    # steps, and one to 0.57.
    scores = [step["critic/score/mean"] for step in steps]
    stages = result["stages"]
    assert isinstance(stages, dict)
    assert sum(scores[8:]) / 8 - stages["sft"]["pass@1"] >= 0.1, scores


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_the_report_of_the_quickstart_in_a_browser(quickstart: tuple[Path, dict[str, object]]) -> None:
    folder, result = quickstart
    assert (folder / "runs/quickstart/sft/report.html").is_file()
    with opened(folder / str(result["report"])) as page:
        assert page.inner_text("h1 .chip") == "finished"
        assert drawn(page, '[data-metric="critic/score/mean"]')
        assert drawn(page, "#time .plot")
        page.select_option("#by-outcome", "tools")
        before = page.inner_text("#count")
        asked = str(page.locator("#list .row .what").nth(50).text_content())[:60]
        page.keyboard.press("/")
        page.keyboard.type(asked)
        page.locator("#count").filter(has_not_text=before).wait_for()
        page.locator("#list .row").first.click()
        assert int(page.inner_text("#count").split()[0]) < 100
        assert asked in page.inner_text("#detail")
        assert "Tool · calc_gsm8k_reward" in page.inner_text("#detail")
        assert page.locator("#detail [data-t]").count() > 5


def test_gsm8k_sequence(tmp_path: Path, test_data: Path) -> None:
    """The README's commands on real GSM8K, shortened by flags."""
    prepared = succeed(tmp_path, "prep", "gsm8k", "--source", str(test_data / "gsm8k"))
    assert "data/gsm8k/train.parquet  7473 rows" in prepared.stdout
    assert "data/gsm8k/test.parquet  1319 rows" in prepared.stdout
    page = tmp_path / "runs/tiny-gsm8k/report.html"
    fewer = ("--set", "rollout.max_response_tokens=64")
    with local_ray():
        succeed(tmp_path, "sft", "--preset", "tiny-multiturn", "--steps", "3")
        rl = ("rl", "--preset", "tiny-gsm8k", "--algo", "grpo", "--tools", "gsm8k")
        succeed(tmp_path, *rl, "--steps", "2", *fewer)
        page.unlink()  # the run's own
        assert succeed(tmp_path, "report", "tiny-gsm8k").stdout.strip() == "runs/tiny-gsm8k/report.html"
        assert page.stat().st_size > 50_000
        succeed(tmp_path, "generate", "--preset", "tiny-generate", "--limit", "8", *fewer)
    report = json.loads(succeed(tmp_path, "eval", "--pass-at", "5", "--json").stdout)
    assert report["overall"]["problems"] == 8
    assert report["n"] == 5
    succeed(tmp_path, "merge-ckpt", "tiny-gsm8k", "--out", "merged", "--check")
    assert (tmp_path / "merged/model.safetensors").is_file()


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
    recorded = ("--preset", "tiny-arith", "--model", "builtin:tiny", "--replay", "data/none.parquet")
    assert "data/none.parquet: no such file" in refused(arith, "rl", *recorded)
    assert "exclude each other" in refused(arith, "rl", *recorded, "--rollout-only")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in refused(
        arith, "sft", "--preset", "qwen2.5-0.5b-multiturn", "--data", "x.parquet"
    )
    dead = "cluster.address=127.0.0.1:1"
    assert "Connection refused" in refused(arith, "sft", "--preset", "tiny-arith-sft", "--set", dead)
    assert "exist" in refused(arith, "prep", "arith")
    assert sorted(arith.rglob("*")) == before


@pytest.mark.slow
def test_a_server_that_is_not_ray_is_given_up_in_time(arith: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sets = [f"run.dir='{tmp_path}'", f"cluster.address={address}", "cluster.start_deadline_s=2"]
        flags = [word for text in sets for word in ("--set", text)]
        shown = refused(arith, "sft", "--preset", "tiny-arith-sft", *flags)
    assert f"no answer from cluster.address = '{address}' within cluster.start_deadline_s = 2 s" in shown


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
        pytest.param(
            ["sft", "--preset", "tiny-arith-sft", "--steps", "2000"], "tiny-arith-sft", marks=pytest.mark.slow
        ),
        # Few prompts: a step and its save fit into the time that a first Ctrl-C leaves, on a busy machine too.
        (
            [
                *("rl", "--preset", "tiny-arith", "--model", "builtin:tiny"),
                *("--set", "data.batch_size=4", "--steps", "500"),
            ],
            "tiny-arith",
        ),
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
    assert time.monotonic() - sent < 30.0
    assert process.returncode == 130
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() - sent < 30.0:
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


STUCK = """
import asyncio
from pathlib import Path

import torch

from posttrain.engines.hf import HFSampler
from posttrain.train import worker

FLAG = Path(__file__).with_name("flag")
STUCK = Path(__file__).with_name("stuck")
learning_rate, generate = worker.learning_rate, HFSampler.generate


def long_update(optim, step, total_steps):
    while step >= 2 and FLAG.read_text() == "update":
        STUCK.touch()
        torch.randn(256, 256) @ torch.randn(256, 256)
    return learning_rate(optim, step, total_steps)


async def long_generate(self, prompt_ids, params, *images):
    while self.guard.version >= 2 and FLAG.read_text() == "generate":
        STUCK.touch()
        await asyncio.sleep(0.1)
    return await generate(self, prompt_ids, params, *images)


worker.learning_rate, HFSampler.generate = long_update, long_generate
"""
"""A plugin: from step 3 on, workers compute (or engines sample) for as long as the flag says so. The file ``stuck`` is
there once they do."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moments"),
    [
        (["sft", "--preset", "tiny-arith-sft"], [("update", 2)]),
        (
            ["rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--set", "data.batch_size=2"],
            [("generate", 1), ("update", 1)],
        ),
    ],
)
def test_ctrl_c_in_a_step_that_does_not_end(
    arith: Path, tmp_path: Path, command: Sequence[str], moments: Sequence[tuple[str, int]]
) -> None:
    """In each of the moments (where it is stuck, presses) of one run, which goes on each time."""
    (tmp_path / "stuck.py").write_text(STUCK)
    sets = [f"plugins=['{tmp_path / 'stuck.py'}']", f"run.dir='{tmp_path}'", "run.name='long'", "train.save_every=1"]
    command = [*command, "--steps", "4", *(word for text in sets for word in ("--set", text))]
    run, expected = tmp_path / "long", "step 2/"
    for stuck_in, presses in moments:
        (tmp_path / "flag").write_text(stuck_in)
        (tmp_path / "stuck").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *command],
            cwd=arith,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(process, expected, 120)
        begun = time.monotonic()
        latest = run / "checkpoints/latest"
        # It is in step 3, and what is written beside that step is complete: a second press does not wait for it.
        while not ((tmp_path / "stuck").exists() and latest.exists() and latest.read_text() == "global_step_2"):
            assert process.poll() is None
            assert time.monotonic() - begun < 4 * MINUTE
            time.sleep(0.05)
        workers = descendants(process.pid)
        sent = time.monotonic()
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        _, rest = process.communicate(timeout=60)
        assert time.monotonic() - sent < 30.0
        assert process.returncode == 130
        # Episodes are left where they are; an update is not.
        left = "stopped after step 2 of 4; the same command goes on from there"
        assert rest.splitlines()[-1] == (left if stuck_in == "generate" else "interrupted")
        assert "Traceback" not in rest
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() - sent < 30.0:
            time.sleep(0.1)
        assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
        assert latest.read_text() == "global_step_2"
        expected = "resuming after step 2"
    (tmp_path / "flag").write_text("none")
    assert expected in ok(arith, *command).stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def descendants(pid: int) -> set[int]:
    """Process ids of all children of a process, and of theirs."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found |= {child} | descendants(child)
    return found
