"""Whole runs with an engine in FP8, beside one in the trainer's type: what is corrected, and how large the gap is."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.run_commands import run_commands

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
STEPS = 3
SHORTER = ["--set", "cluster.device='cpu'", "--set", "data.batch_size=4", "--set", "rollout.n=4", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The command of docs/fp8.md after a short SFT, and the same without FP8."""
    folder = tmp_path_factory.mktemp("fp8")
    page = (REPO / "docs" / "fp8.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    (guide,) = (shlex.split(line)[1:] for line in block.splitlines())
    plain = ["rl", "--preset", "tiny-arith", "--set", "rollout.quantization=none", "--name", "plain"]
    before = [
        ["prep", "arith", "--train-rows", "60", "--test-rows", "10"],
        ["sft", "--preset", "tiny-arith-sft", "--steps", "60", "--set", "cluster.device='cpu'"],
    ]
    run_commands(folder, [*before, [*guide, *SHORTER], [*plain, *SHORTER]])
    return folder


def steps(folder, name):
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollout_gap/mean_abs" in row]


def test_the_commands_of_the_guide(folder):
    """The gap is that of FP8, the loss is corrected for it, and each update passes its check."""
    rows, plain = steps(folder, "in-fp8"), steps(folder, "plain")
    assert len(rows) == len(plain) == STEPS
    for row in rows:
        assert 1e-3 < row["rollout_gap/mean_abs"] < 0.1
        assert 1e-3 < row["sync/check_gap"] < 0.3
        assert 0.9 < row["correction/effective_sample_size"] < 1.0
        assert 0.9 < row["correction/weight/mean"] < 1.1
    for row in plain:
        assert row["rollout_gap/mean_abs"] < 1e-4
        assert not any(name.startswith("correction/") for name in row)


def test_its_log_says_what_is_quantized(folder):
    log = (folder / "runs" / "in-fp8" / "logs" / "driver.log").read_text()
    assert "engines compute in FP8: 100 % of the linear layers' weights, in blocks of 64 x 64" in log
    assert "algo.correction.weight = 'token', cut at 2" in log
