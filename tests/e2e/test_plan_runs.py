"""What a plan says of batches, beside what runs on the CPU then log; and `--dry-run`, which writes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.cluster.cluster import local_ray
from posttrain.plan import command as plan
from posttrain.train.schedule import learning_rate
from tests.helpers.commands import invoke, succeed

SFT = ("sft", "--preset", "tiny-arith-sft", "--steps", "2", "--set", "train.tokens_per_microbatch=600")
RL = (
    "rl", "--preset", "tiny-arith", "--model", "builtin:tiny", "--steps", "1", "--set", "data.batch_size=4", "--set",
    "algo.updates_per_step=2", "--set", "train.tokens_per_microbatch=700",
)  # fmt: skip


def number(shown: str, row: str) -> float:
    """The last number in a row of a plan's table."""
    [line] = re.findall(rf"^  {re.escape(row)}  +(.*)$", shown, flags=re.M)
    return float(line.split()[-1].replace(",", ""))


@pytest.fixture(scope="module", autouse=True)
def without_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("COLUMNS", "120")
        yield


@pytest.fixture(scope="module")
def ray_here(without_gpu: None) -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    succeed(folder, "prep", "arith", "--train-rows", "64", "--test-rows", "4")
    return folder


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_plan_of_a_dry_run_is_what_the_run_does(here: Path, ray_here: None) -> None:
    before = files(here)
    shown = succeed(here, *SFT, "--dry-run").stdout
    assert files(here) == before
    succeed(here, *SFT)
    folder = here / "runs" / "tiny-arith-sft"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert number(shown, "tokens") == rows[0]["train/tokens"]
    assert number(shown, "tokens with loss") == rows[0]["train/loss_tokens"] < rows[0]["train/tokens"]
    assert number(shown, "steps of the run") == len(rows) == 2
    optim = plan.stored_config(folder).train.optim
    assert [row["train/lr"] for row in rows] == [learning_rate(optim, step, 2) for step in (0, 1)]
    told = dict(re.findall(r"([\d.e-]+) at (\d+)", shown))
    assert {int(step): float(rate) for rate, step in told.items()} == pytest.approx(
        {1: rows[0]["train/lr"], 2: rows[1]["train/lr"]}, rel=1e-2
    )
    compared = json.loads(succeed(here, "plan", "--run", "tiny-arith-sft", "--json").stdout)["compared"]
    assert [row["metric"] for row in compared] == ["train/tokens"]  # without a GPU nothing else is predicted
    assert abs(compared[0]["off"]) < 0.01


@pytest.mark.slow
def test_the_batches_of_rl_are_those_of_its_plan(here: Path, ray_here: None) -> None:
    before = files(here)
    shown = succeed(here, *RL, "--dry-run").stdout
    assert files(here) == before
    assert "groups of each" in shown
    assert re.search(r"groups of each +2, 2", shown)
    succeed(here, *RL)
    folder = here / "runs" / "tiny-arith"
    [row] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = json.loads(succeed(here, "plan", "--run", "runs/tiny-arith", "--json").stdout)["compared"]
    assert told[0]["metric"] == "perf/total_num_tokens"
    assert told[0]["predicted"] == pytest.approx(row["perf/total_num_tokens"], rel=0.02)
    assert [(r["predicted"], r["measured"]) for r in told if r["metric"] == "actor/updates"] == [(2, 2)]
    replayed = succeed(here, *RL, "--replay", "runs/tiny-arith/rollouts", "--name", "again", "--dry-run").stdout
    table = re.search(r"^  tokens  +([\d,]+)", replayed, flags=re.M)
    assert table is not None
    assert float(table[1].replace(",", "")) == row["perf/total_num_tokens"]
    # Nothing is longer than the plan reckons with.
    assert row["perf/total_num_tokens"] <= number(shown, "tokens")


@pytest.mark.slow
def test_an_asynchronous_run_is_compared_by_its_step_and_its_waits(here: Path, ray_here: None) -> None:
    succeed(here, *RL, "--set", "rollout.staleness=1", "--steps", "3", "--name", "ahead")
    folder = here / "runs" / "ahead"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0.0 < row["tools/seconds_per_group/median"] <= row["tools/seconds_per_group/max"] for row in rows)
    here_told = json.loads(succeed(here, "plan", "--run", "ahead", "--json").stdout)["compared"]
    assert [row["metric"] for row in here_told] == ["perf/total_num_tokens", "actor/updates"]  # of no GPU, no times
    told = json.loads(succeed(here, "plan", "--run", "ahead", "--gpu", "h200", "--json").stdout)
    compared = {row["metric"]: row for row in told["compared"]}
    assert {"timing_s/update_actor", "timing_s/sync", "timing_s/step", "wait/updates"} <= compared.keys()
    assert "timing_s/gen" not in compared  # which is what trainers wait for, and not the time of sampling
    assert compared["timing_s/step"]["measured"] == rows[-1]["timing_s/step"]
    assert 0.0 < compared["wait/updates"]["predicted"] < 1.0
    once = {"timing_s/start", "timing_s/engines", "timing_s/first_sync", "timing_s/warm_up"}
    assert [once & row.keys() for row in rows] == [once, set(), set()]
    for row in rows:  # no second is counted in two phases
        phases = [seconds for name, seconds in row.items() if name.startswith("timing_s/") and name != "timing_s/step"]
        assert sum(phases) <= row["timing_s/step"]


def test_bad_input_ends_a_dry_run_as_it_ends_a_run(here: Path) -> None:
    for arguments in (
        (*RL, "--model", "builtin:tinny"),
        ("sft", "--set", "x=1"),
    ):
        done = invoke(here, *arguments, "--dry-run")
        assert done.exit_code == 2, done.stderr[-2000:]
        assert "hint: " in done.stderr
