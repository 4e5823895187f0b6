"""Rewards in whole `rl` runs: graders that fail, composed parts, a judge, a reward model, programs in the sandbox."""

import json
import math
import re

import pytest

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, PosttrainError, RunError
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl
from posttrain.tracking.warnings import read_warnings
from tests.unit.sandbox.test_sandbox import REASON

PLUGIN = """
import time, zlib
from posttrain.rewards import DATA_SOURCES, GRADERS
from posttrain.core.types import Score

DATA_SOURCES["test/moody"] = "moody"

@GRADERS.register("moody")
def moody(response, ground_truth, extra_info):
    kind = zlib.crc32(response.encode()) % 4
    if kind == 0:
        raise ValueError("I do not grade that")
    if kind == 1:
        time.sleep(60)
    return Score(1.0 + kind, kind == 3, parts={"kind": float(kind)})
"""


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture
def run(tmp_path):
    """``run(rows, *sets)``: two steps of `rl` on the untrained tiny model; the metrics of each step."""

    def start(rows, *sets, steps=2):
        file = tmp_path / "train.parquet"
        write_rows(file, rows)
        sets = (
            "model.path='builtin:tiny'",
            "data.batch_size=2",
            f"train.steps={steps}",
            "rollout.n=4",
            "rollout.tools=[]",
            "rollout.max_response_tokens=8",
            "reward.deadline_s=1.5",
            *sets,
        )
        flags = {"run.dir": str(tmp_path / "runs"), "run.name": "r", "data.train": str(file)}
        folder = rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return start


def row(number, source="test/moody", truth="8", **extra):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Say {number}"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": number, **extra},
    }


@pytest.fixture(scope="module")
def moody(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "moody.py"
    path.write_text(PLUGIN)
    return f"plugins=['{path}']"


def test_a_grader_that_raises_or_hangs_is_never_a_zero(run, moody, tmp_path, capsys):
    metrics = run([row(i) for i in range(4)], moody)
    # A warning with the count and the first error, on the console and in the file that the report reads.
    warning, *_ = [w for w in read_warnings(tmp_path / "runs" / "r") if w.name == "graders_fail"]
    assert f"{warning.message}\n" in capsys.readouterr().err
    assert re.match(
        r"\d of 8 episodes could not be graded in steps? .*; the first: the grader of test/moody failed: ", warning.text
    )
    assert sum(m["rollout/grader_failed"] for m in metrics) > 0
    for step in metrics:
        # Verdicts are 3 and 4. Were a failure a 0, the lowest would be 0 and the mean lower.
        assert step["critic/score/min"] >= 3.0
        assert step["reward/score/mean"] == pytest.approx(1.0 + step["reward/kind/mean"])
        assert step["critic/score/mean"] == pytest.approx(step["reward/score/mean"])
        assert math.isfinite(step["actor/grad_norm"])


def test_a_failure_is_a_zero_where_the_config_says_so(run, moody):
    metrics = run([row(i) for i in range(4)], moody, "reward.on_error=zero", steps=1)
    (step,) = metrics
    failed = step["rollout/grader_failed"]
    assert failed > 0
    assert step["critic/score/min"] == 0.0
    # Each part of such an episode counts as 0 too.
    assert step["critic/score/mean"] == pytest.approx(step["reward/score/mean"])


def test_a_failure_ends_the_run_where_the_config_says_so(run, moody):
    with pytest.raises(
        RunError, match=r"could not be graded: the grader of test/moody failed: (grader 'moody'|timed out)"
    ):
        run([row(i) for i in range(4)], moody, "reward.on_error=raise")


def test_conversations_are_shown_with_their_parts(run, capsys):
    rows = [row(i, "openai/gsm8k") for i in range(4)]
    (step,) = run(
        rows,
        "reward.examine=3",
        "reward.weights={score=1.0, format=0.5, overlong=1.0}",
        "reward.overlong.buffer_tokens=4",
        steps=1,
    )
    shown = capsys.readouterr().err
    assert shown.count("---- openai/gsm8k") == 3
    assert shown.count("[user] Say") == 3
    assert "[expected] 8" in shown
    assert "overlong -1" in shown
    assert step["reward/overlong/mean"] == -1.0  # an untrained model writes to the end
    assert step["critic/score/mean"] == pytest.approx(
        0.5 * step["reward/format/mean"] - 1.0 + step["reward/score/mean"]
    )


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_programs_are_graded_in_the_sandbox(run):
    truth = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    (step,) = run([row(i, "codecontests", truth) for i in range(4)], steps=1)
    assert step["rollout/grader_failed"] == 0
    assert step["reward/tests_passed/mean"] == 0.0


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["reward.function=nofile.py:f"], "plugin file not found"),
        (["reward.weights={score=1.0, 'tool/x'=1.0}"], "reward.weights names tool/x"),
        (["reward.model.path=/no/such/model", "reward.weights={model=1.0}"], "/no/such/model"),
        (["reward.judge.url='http://127.0.0.1:9/v1'", "reward.weights={judge=1.0}"], "reward.judge.model is empty"),
        (["sandbox.mode=remote", "sandbox.url='http://127.0.0.1:9'"], "did not answer"),
    ],
)
def test_rewards_that_cannot_work_are_refused_before_the_run_exists(run, sets, message, tmp_path):
    source = "codecontests" if "sandbox" in sets[0] else "openai/gsm8k"
    with pytest.raises(PosttrainError, match=message):
        run([row(0, source), row(1, source)], *sets)
    assert not (tmp_path / "runs").exists()


def test_a_data_source_without_a_grader_is_refused_before_the_run_exists(run, tmp_path):
    with pytest.raises(ConfigError, match="no grader for data source 'openai/gsm8'"):
        run([row(0, "openai/gsm8"), row(1, "openai/gsm8")])
    assert not (tmp_path / "runs").exists()
