"""Runs that are recorded, runs that only record, and runs from what was recorded."""

import gzip
import json

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.cluster.cluster import local_ray
from posttrain.cluster.samplers import RemoteSampler
from posttrain.config.presets import resolve
from posttrain.core.errors import Interrupted
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl
from posttrain.train import checkpoint
from tests.helpers.stopped_runs import cut_back

PLUGIN = """
import signal
import zlib
from pathlib import Path

from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.core.types import Score

DATA_SOURCES["test/any"] = "any"
STOP = Path(__file__).with_name("stop")

@GRADERS.register("any")
@cheap  # runs in the driver
def grade(response, ground_truth, extra_info):
    if STOP.exists():
        STOP.unlink()
        signal.raise_signal(signal.SIGINT)
    score = float(zlib.crc32(response.encode()) % 4)
    return Score(score, score >= 2)
"""
"""A reward that an untrained model gets in different amounts, and Ctrl-C where a file `stop` lies beside it."""

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with data and a grader."""
    folder = tmp_path_factory.mktemp("replay")
    rows = [
        {
            "data_source": "test/any",
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "reward_model": {"style": "rule", "ground_truth": "8"},
        }
        for i in range(8)
    ]
    write_rows(folder / "train.parquet", rows)
    write_rows(folder / "val.parquet", rows[:2])
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def sampling(here):
    """Flags and keys of a run that samples."""
    return [
        *(f"data.train='{here}/train.parquet'", "data.batch_size=2", "rollout.n=4", "rollout.tools=[]"),
        *("rollout.max_response_tokens=8", f"plugins=['{here}/plugin.py']"),
    ]


def run(here, name, *sets, **flags):
    """The folder and the metrics of one `rl` run on the untrained tiny model."""
    optim = ["train.optim.lr=3e-3", "train.optim.warmup_ratio=0.0", "train.optim.eps=1e-5"]
    sets = ["model.path='builtin:tiny'", f"train.steps={STEPS}", "algo.kl_coef=0.1", *optim, *sets]
    flags = {"run.dir": str(here / "runs"), "run.name": name} | {k.replace("__", "."): v for k, v in flags.items()}
    folder = rl.run(resolve("rl", "tiny-arith", sets=sets, flags=flags))
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def original(here):
    return run(here, "original", *sampling(here), f"data.val='{here}/val.parquet'", "val.n=2", "train.val_every=2")


def recorded(folder):
    """The rows of a run's traces, by file."""
    return {file.name: pq.read_table(file).to_pylist() for file in sorted((folder / "rollouts").glob("*.parquet"))}


def test_every_episode_is_recorded(original):
    folder, metrics = original
    files = recorded(folder)
    steps = [f"step_{step:06}.parquet" for step in range(1, STEPS + 1)]
    assert list(files) == [*steps, "val_000002.parquet", "val_000003.parquet"]
    for step, (name, step_metrics) in enumerate(zip(steps, metrics, strict=True), start=1):
        rows = files[name]
        assert [row["group"] for row in rows] == [0] * 4 + [1] * 4
        assert {(row["kind"], row["step"], row["temperature"]) for row in rows} == {("train", step, 1.0)}
        # Each step is sampled with the weights of the update before.
        assert {v for row in rows for v in row["weight_version"]} == {-1, step - 1}
        assert sum(row["reward"] for row in rows) / 8 == pytest.approx(step_metrics["critic/score/mean"])
        for row in rows:
            texts = [m["content"] for m in json.loads(row["messages"])]
            assert texts[0] == f"Say {row['row']}"
            assert len(texts) == row["turns"] + 1
            assert dict(row["reward_parts"])["score"] == row["reward"]
    assert [(row["kind"], row["step"], row["row"]) for row in files["val_000002.parquet"]] == [
        ("val", 2, 0),
        ("val", 2, 0),
        ("val", 2, 1),
        ("val", 2, 1),
    ]


EXACT = ("critic/score/mean", "critic/advantages/max", "response_length/mean", "rollout/accuracy", "actor/lr")
CLOSE = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "rollout_gap/mean_abs")


def test_a_replay_from_the_same_start_repeats_the_run(here, original, capsys):
    """With nothing of what samples: no data file, no grader, an engine that is not installed."""
    folder, metrics = original
    sets = ["rollout.engine='sglang'", f"data.val='{here}/val.parquet'", "data.keep={level = [1]}"]
    again, replayed = run(here, "again", *sets, rollout__replay=str(folder / "rollouts"))
    notes = capsys.readouterr().err
    assert "data.val is not used" in notes
    assert "data.keep is not used" in notes
    for wanted, got in zip(metrics, replayed, strict=True):
        for name in EXACT:
            assert got[name] == wanted[name], name
        for name in CLOSE:
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
        assert got["actor/grad_norm"] > 0.01
        assert got["actor/pg_clipfrac"] == 0.0
        assert "timing_s/gen" not in got
        assert "sync/check_gap" not in got
    # The weights moved, or the steps after the first would prove nothing.
    assert metrics[0]["actor/kl_loss"] < 1e-6 < 1e-3 < metrics[2]["actor/kl_loss"]
    assert not (again / "rollouts").exists()
    assert checkpoint.find(again).step == STEPS


@pytest.mark.slow
def test_a_replay_by_another_policy_is_corrected_for(here, original):
    """A larger learning rate: from the second step on, another policy than the trained one sampled."""
    folder, metrics = original
    traces = str(folder / "rollouts" / "step_*.parquet")
    sets = ["train.optim.lr=1e-2", "algo.updates_per_step=2"]
    _, replayed = run(here, "faster", *sets, rollout__replay=traces)
    gaps = [m["rollout_gap/mean_abs"] for m in replayed]
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps[2] > 100 * metrics[2]["rollout_gap/mean_abs"]
    assert replayed[2]["actor/pg_clipfrac"] > 0.0
    assert abs(replayed[2]["actor/ppo_kl"]) > 1e-3
    assert "timing_s/old_log_prob" not in replayed[0]


EAGER = """
from functools import partial

import torch

torch.compile = partial(torch.compile, backend="eager")
"""
"""Graphs are made as ever, and no code for them, which takes most of the time."""


@pytest.mark.slow
def test_the_first_update_of_a_run_finds_its_graphs_compiled(here, original, monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile)  # what the plugin does here, too, ends with the test
    (here / "eager.py").write_text(EAGER)
    sets = ["train.compile='on'", "run.profile='1:1'", "algo.kl_coef=0.0", f"plugins=['{here}/eager.py']"]
    folder, metrics = run(here, "warm", *sets, rollout__replay=str(original[0] / "rollouts"))
    trace = json.loads(gzip.decompress((folder / "profile" / "step_1_rank_0.json.gz").read_bytes()))
    events = {event["name"] for event in trace["traceEvents"]}
    assert any(name.startswith("Torch-Compiled Region") for name in events)
    assert not any("compile_inner" in name for name in events)
    assert ["timing_s/warm_up" in row for row in metrics] == [True, False, False]


def test_sampling_without_training(here, capsys):
    """Stopped after a step, it goes on from its traces; what it leaves can be trained on."""
    sets = [*sampling(here), "train.val_every=1", f"data.val='{here}/val.parquet'"]
    (here / "stop").touch()
    with pytest.raises(Interrupted, match="stopped after step 1 of 3"):
        run(here, "samples", *sets, rollout__only=True)
    first = recorded(here / "runs" / "samples")
    assert list(first) == ["step_000001.parquet"]
    folder, metrics = run(here, "samples", *sets, rollout__only=True)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert "data.val is not used: rollout.only trains nothing" in capsys.readouterr().err
    for step in metrics:
        assert 0.0 <= step["critic/score/mean"] <= 3.0
        assert step["response_length/mean"] <= 8
        assert step["rollout/failed"] == 0.0
        assert not [name for name in step if name.startswith("actor/") or "update" in name or "sync" in name]
    files = recorded(folder)
    assert list(files) == [f"step_{step:06}.parquet" for step in (1, 2, 3)]
    assert files["step_000001.parquet"] == first["step_000001.parquet"]
    assert {v for rows in files.values() for row in rows for v in row["weight_version"]} == {-1, 0}
    # Every prompt comes in turn, also after the stop.
    seen = [row["row"] for rows in files.values() for row in rows]
    assert len(set(seen)) == 6
    assert not (folder / "checkpoints").exists()
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_sampling_that_goes_on_samples_what_it_had_not(here, monkeypatch):
    """One epoch of the same prompts a step: the step after the stop is that of a run that was not stopped, and no copy
    of the first. Engines are told how many steps were sampled before them, for those that look at no request's seed."""
    before, start = [], RemoteSampler.start

    async def started(sampler, spec, *args):
        before.append(spec.steps_before)
        await start(sampler, spec, *args)

    monkeypatch.setattr(RemoteSampler, "start", started)
    sets = [*sampling(here), "data.batch_size=8", "train.epochs=2", "train.steps=2", "data.shuffle=false"]
    sets += ["rollout.batch_invariant=true"]
    whole, _ = run(here, "all-of-it", *sets, rollout__only=True)
    (here / "stop").touch()
    with pytest.raises(Interrupted, match="stopped after step 1 of 2"):
        run(here, "half-of-it", *sets, rollout__only=True)
    folder, _ = run(here, "half-of-it", *sets, rollout__only=True)
    first, second = ([row["tokens"] for row in rows] for rows in recorded(folder).values())
    assert second == [row["tokens"] for row in recorded(whole)["step_000002.parquet"]]
    assert sum(map(list.__eq__, first, second)) < len(first) / 2
    assert before == [0, 0, 1]


@pytest.mark.slow
def test_a_replay_that_was_stopped_goes_on(here, original):
    folder, _ = original
    sets = ["train.save_every=1", "train.epochs=2", "train.steps=5", "checkpoint.keep=5"]
    again, whole = run(here, "whole", *sets, rollout__replay=str(folder / "rollouts"))
    assert [m["step"] for m in whole] == [1, 2, 3, 4, 5]
    # The second pass reads the first step again.
    assert whole[3]["critic/score/mean"] == whole[0]["critic/score/mean"]
    cut_back(again, 2)
    _, parts = run(here, "whole", *sets, rollout__replay=str(folder / "rollouts"))
    assert [m["step"] for m in parts] == [1, 2, 3, 4, 5]
    assert [m["time"] == w["time"] for m, w in zip(parts, whole, strict=True)] == [True, True, False, False, False]
    assert parts[3]["critic/score/mean"] == whole[3]["critic/score/mean"]
