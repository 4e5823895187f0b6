"""Golden runs: what counts as a difference between two records, and what is read of a run's folder."""

import importlib.util
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed import checkpoint

FILE = Path(__file__).parents[3] / "scripts" / "golden.py"


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden", FILE)
    module = sys.modules["golden"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["golden"]


def rl(**changed):
    """A record of one run, with some values changed."""
    keys = {"metrics | step 1 | sync/gap": "0x0.0p+0", "traces/step_1.parquet | tokens": "aa"}
    return {"rl": keys | changed}


def test_equal_records_have_no_difference(golden):
    assert golden.differences(rl(), rl(), {}) == []


def test_lists_a_value_that_changed(golden):
    name = "metrics | step 1 | sync/gap"
    assert golden.differences(rl(), rl(**{name: "-0x0.0p+0"}), {}) == [f"rl: {name}: 0x0.0p+0 != -0x0.0p+0"]


def test_lists_names_and_runs_of_one_record_only(golden):
    more = rl(**{"left out | step 1 | timing_s/gen": ""})
    assert golden.differences(more, rl(), {}) == ["rl: left out | step 1 | timing_s/gen: only in BEFORE"]
    assert golden.differences(rl(), more, {}) == ["rl: left out | step 1 | timing_s/gen: only in AFTER"]
    assert golden.differences({}, rl(), {}) == ["rl: only in AFTER"]
    assert golden.differences(rl(), {}, {}) == ["rl: only in BEFORE"]


def test_a_rename_applies_to_names_and_to_what_lies_in_folders(golden):
    after = {"rl": {"metrics | step 1 | sync/check": "0x0.0p+0", "rollouts/step_1.parquet | tokens": "aa"}}
    renames = {"sync/gap": "sync/check", "traces": "rollouts"}
    assert golden.differences(rl(), after, renames) == []
    assert len(golden.differences(rl(), after, {"traces": "rollouts"})) == 2
    # Neither part of a name, nor a name that the next entry of the table would rename again.
    assert golden.renamed("metrics | sync/gap_max", {"sync/gap": "sync/check"}) == "metrics | sync/gap_max"
    assert golden.renamed("metrics | a", {"a": "b", "b": "c"}) == "metrics | b"


def test_exact_values_tell_bits_apart(golden):
    assert golden.exact(0.1 + 0.2) != golden.exact(0.3)
    assert golden.exact(1) != golden.exact(1.0)
    assert golden.flat({"a": [1, {"b": 0.5}], "c": {}}, "x") == {
        "x | a | 0": "1",
        "x | a | 1 | b": "0x1.0000000000000p-1",
        "x | c": "{}",
    }


def write_run(folder, loss=0.25, seconds=1.0, weight=1.0):
    """A run's folder with metrics, a table and a checkpoint of one tensor."""
    folder.mkdir()
    metrics = {"step": 1, "time": seconds, "train/loss": loss, "timing_s/step": seconds, "perf/padding": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    pq.write_table(pa.table({"tokens": [[1, 2]], "tool_seconds": [seconds]}), folder / "rows.parquet")
    checkpoint.save({"weight": torch.full((2, 2), weight), "step": 3}, checkpoint_id=folder / "model", no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reads_what_a_run_computed_and_only_names_what_the_machine_decides(golden, tmp_path):
    first = dict(golden.read_folder(write_run(tmp_path / "first")))
    assert first["metrics | step 1 | train/loss"] == "0x1.0000000000000p-2"
    assert {"left out | step 1 | timing_s/step", "rows.parquet | left out | tool_seconds"} <= first.keys()
    assert {
        "metrics | step 1 | perf/padding",
        "rows.parquet | tokens",
        "model | weight",
        "model | step",
    } <= first.keys()
    slower = dict(golden.read_folder(write_run(tmp_path / "slower", seconds=2.0)))
    assert golden.differences({"sft": first}, {"sft": slower}, {}) == []
    other = dict(golden.read_folder(write_run(tmp_path / "other", loss=0.25000001, weight=1.0000001)))
    found = [line.split(": ")[1] for line in golden.differences({"sft": first}, {"sft": other}, {})]
    assert found == ["metrics | step 1 | train/loss", "model | weight"]


def test_compare_ends_with_1_where_records_differ(golden, tmp_path, capsys):
    before, same, other = (tmp_path / name for name in ("before.json", "same.json", "other.json"))
    before.write_text(json.dumps(rl()))
    same.write_text(json.dumps(rl()))
    other.write_text(json.dumps(rl(more="1")))
    assert golden.main(["compare", str(before), str(same)]) == 0
    assert golden.main(["compare", str(before), str(other)]) == 1
    assert capsys.readouterr().out == "rl: more: only in AFTER\n"


def test_runs_come_after_those_they_need(golden):
    assert golden.chosen([]) == list(golden.RUNS)
    assert golden.chosen(["eval"]) == ["prep", "sft", "generate", "eval"]
    for place, run in enumerate(golden.RUNS.values()):
        assert set(run.needs) <= set(list(golden.RUNS)[:place])
