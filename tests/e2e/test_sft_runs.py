"""Whole runs of `sft` in real processes on the CPU: faults, traces, metrics."""

import gzip
import json

import pytest
import torch

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, RunError
from posttrain.data.parquet import Conversation, sft_row, write_rows
from posttrain.models.builtin import builtin_tokenizer, create_builtin
from posttrain.sft import command as sft
from posttrain.tracking.warnings import read_warnings
from posttrain.train import checkpoint


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture
def sft_run(tmp_path):
    """``sft_run(*sets)``: one `sft` run, and its folder."""
    words = ["red", "green", "blue"]
    for name, count in (("train", 24), ("val", 4)):
        chats = [[{"role": "user", "content": f"Say {words[i % 3]}"}, answer(words[i % 3])] for i in range(count)]
        write_rows(tmp_path / f"{name}.parquet", [sft_row(Conversation(chat)) for chat in chats])
    preset = tmp_path / "plain.toml"
    preset.write_text('command = "sft"\n')

    def run(*sets):
        fixed = [
            f"run.dir='{tmp_path / 'runs'}'",
            "run.name='r'",
            f"data.train='{tmp_path / 'train.parquet'}'",
            "data.batch_size=4",
            "run.logger=['jsonl', 'console']",
            "cluster.device='cpu'",
            "train.optim.lr=1e-3",
        ]
        sft.run(resolve("sft", str(preset), [*fixed, *sets]))
        return tmp_path / "runs" / "r"

    return run


def answer(word):
    return {"role": "assistant", "content": f"{word} {word}"}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_early_stop_ends_the_run_as_finished(sft_run, tmp_path, capsys):
    """At a rate of 0 nothing gets better."""
    sets = ["train.optim.lr=0.0", f"data.val='{tmp_path / 'val.parquet'}'", "train.val_every=2", "train.save_every=1"]
    sets += ["train.early_stop.patience=2", "data.batch_size=32"]
    folder = sft_run(*sets, "train.steps=20")
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
    found = checkpoint.find(folder)
    assert found.step == 6
    assert found.read("meta.json")["early_stop"] == {
        "best": pytest.approx(rows(folder)[1]["val/loss"]),
        "best_step": 2,
        "without_better": 2,
    }
    err = capsys.readouterr().err
    assert "stopped early after step 6 of 20: val/loss has not fallen below" in err
    assert "warning: data.batch_size = 32, and there are 24 rows: a step has a row up to 2 times" in err
    assert f"validation on 4 conversations of {tmp_path / 'val.parquet'}, every 2 steps and after the last\n" in err
    assert err.count("validation: 4 conversations\n") == 3  # before it waits for each


@pytest.fixture
def huge(tmp_path):
    """A model whose weights are finite, and so large that nothing that it computes is."""
    model = create_builtin("tiny", 0)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").fill_(3e38)
    model.save_pretrained(tmp_path / "huge")
    builtin_tokenizer("tiny").save_pretrained(tmp_path / "huge")
    return f"model.path='{tmp_path / 'huge'}'"


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_its_batch_and_names(sft_run, huge, tmp_path, capsys):
    with pytest.raises(RunError, match=r"2 updates in a row were skipped, the last at step 2") as error:
        sft_run(huge, "train.max_skipped_steps=2", "train.steps=6")
    folder = tmp_path / "runs" / "r"
    assert str(folder / "nonfinite_step_2.pt") in error.value.message
    assert (folder / "nonfinite_step_2.pt").is_file()
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert [row["train/skipped_steps"] for row in rows(folder)] == [1.0]
    err = capsys.readouterr().err
    assert "step 1: update skipped" in err
    assert "warning: step 1: 1 update skipped so far" in err
    assert [w.name for w in read_warnings(folder)] == ["skipped_updates"]


def test_a_run_with_less_steps_than_may_be_skipped_does_not_finish_without_a_loss(sft_run, huge, tmp_path):
    """Nor does it where it is started again: what is of no use is never saved."""
    for _ in range(2):
        with pytest.raises(RunError, match="step 1 is not saved, and there is no checkpoint before it") as error:
            sft_run(huge, "train.steps=1")
        assert "lower train.optim.lr" in error.value.hint
        folder = tmp_path / "runs" / "r"
        assert json.loads((folder / "run.json").read_text())["status"] == "failed"
        assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_traces_and_speed_of_the_steps_asked_for(sft_run, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.profile = '5:6', and the run has 4 steps"):
        sft_run("train.steps=4", "run.profile='5:6'")
    assert not (tmp_path / "runs").exists()
    folder = sft_run("train.steps=4", "run.profile='2:3'", "cluster.workers=2")
    names = [f"step_{step}_rank_{rank}.{kind}" for step in (2, 3) for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert sorted(p.name for p in (folder / "profile").iterdir()) == sorted(names)
    for rank in (0, 1):
        trace = gzip.decompress((folder / "profile" / f"step_3_rank_{rank}.json.gz").read_bytes())
        found = {event["name"] for event in json.loads(trace)["traceEvents"]}
        assert "aten::mm" in found
        assert any("Optimizer.step" in name for name in found)  # the whole update, not a part of it
        assert "aten::mm" in (folder / "profile" / f"step_3_rank_{rank}.txt").read_text()
    for row in rows(folder):
        assert ("timing_s/profile" in row) == (row["step"] in (2, 3))
        assert 0.0 <= row["perf/data_wait"] < 1.0
        assert 0.0 <= row["perf/padding"] < 1.0
        assert row["perf/tokens_per_second_per_gpu"] == pytest.approx(row["perf/throughput"] / 2)
        assert row["perf/memory_gib"] > 0.0
        assert "perf/mfu" not in row  # nobody knows a CPU's peak
