"""Metrics in TensorBoard's event files and in W&B's offline files, read back."""

import json
import math
import struct
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import Config
from posttrain.core.errors import ConfigError, Interrupted, RunError
from posttrain.runs import preflight as startup
from posttrain.tracking import Tracker

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


def log(
    folder: Path, logger: str, steps: range, after: int | None = None, config: dict[str, object] | None = None
) -> None:
    """A run that logs ``a = step`` and ``b = nan``; with ``after`` one that goes on after that step."""
    with Tracker(folder, "t", 9, [logger], config) as tracker:
        if after is not None:
            tracker.rewind(after)
        for step in steps:
            tracker.log(step, {"a": float(step), "b": math.nan, "acc/mean@4": 0.5})


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {name: [(e.step, e.value) for e in board.Scalars(name)] for name in board.Tags()["scalars"]}


@needs_tensorboard
def test_tensorboard(tmp_path: Path) -> None:
    with Tracker(tmp_path, "t", 9, ["tensorboard"]) as tracker:
        tracker.log(1, {"train/loss": 0.5})
        found = events(tmp_path)  # while the run goes on
    assert found.keys() == {"train/loss", "timing_s/step"}
    assert found["train/loss"] == [(1, 0.5)]


@needs_tensorboard
def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    log(tmp_path, "tensorboard", range(1, 6))
    log(tmp_path, "tensorboard", range(3, 7), after=2)
    log(tmp_path, "tensorboard", range(6, 8), after=5)
    found = events(tmp_path)
    assert found["a"] == [(step, float(step)) for step in range(1, 8)]
    assert [math.isnan(value) for _, value in found["b"]] == [True] * 7


def records(file: Path) -> list[Any]:
    """Of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
    return found


def wandb_runs(folder: Path) -> list[tuple[str, dict[str, object], list[dict[str, object]]]]:
    """(id, config, rows) of each session of a run."""
    sessions = []
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        run_id, config, history = "", {}, []
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        sessions.append((run_id, config, history))
    return sessions


@needs_wandb
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log(tmp_path, "wandb", range(1, 6), config={"train": {"steps": 9}})
    log(tmp_path, "wandb", range(3, 8), after=2)
    deadline = time.monotonic() + 60  # its own process may still be writing when `finish` has returned
    runs = wandb_runs(tmp_path)
    while sum(bool(run_id) + len(rows) for run_id, _, rows in runs) < 2 + 7:
        assert time.monotonic() < deadline, runs
        time.sleep(0.2)
        runs = wandb_runs(tmp_path)
    assert len(runs) == 2
    assert len({run_id for run_id, *_ in runs}) == 1
    rows = [row for _, _, history in runs for row in history]
    assert [(row["_step"], row["a"]) for row in rows] == [(step, float(step)) for step in range(1, 8)]
    assert all(math.isnan(float(str(row["b"]))) for row in rows)
    assert runs[0][1]["train"] == {"steps": 9}
    (tmp_path / "other").mkdir()
    log(tmp_path / "other", "wandb", range(1, 2))
    assert wandb_runs(tmp_path / "other")[0][0] != runs[0][0]


@needs_wandb
def test_wandb_gets_a_step_when_it_ends_and_not_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(tmp_path, "t", 9, ["wandb"]) as tracker:
        tracker.log(3, {"a": 1.0})
        deadline = time.monotonic() + 60  # as above
        while not any(rows for *_, rows in wandb_runs(tmp_path)):  # a killed run would leave what is there now
            assert time.monotonic() < deadline
            time.sleep(0.2)


@needs_wandb
def test_wandb_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    import wandb

    wandb.teardown()  # it has read its variables
    with pytest.raises(ConfigError, match="W&B did not start") as error:
        log(tmp_path, "wandb", range(1, 2))
    wandb.teardown()
    assert "WANDB_MODE=offline" in str(error.value.hint)


@needs_wandb
def test_a_variable_that_wandb_cannot_read_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "of-line")
    import wandb

    wandb.teardown()
    with pytest.raises(ConfigError, match="W&B did not start: mode: Input should be 'online'") as error:
        log(tmp_path, "wandb", range(1, 2))
    wandb.teardown()
    assert "\n" not in error.value.message


@needs_mlflow
def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log(tmp_path, "mlflow", range(1, 6), config={"train": {"steps": 9}})
    log(tmp_path, "mlflow", range(3, 8), after=2)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("posttrain")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == (tmp_path.name, "FINISHED", {"train.steps": "9"})
    history = client.get_metric_history(run.info.run_id, "a")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(s, float(s)) for s in range(1, 8)]
    assert {"a", "b", "timing_s/step", "acc/mean_at_4"} == set(run.data.metrics)


@needs_mlflow
@pytest.mark.parametrize("name", ["a?b", "a%20b", "50% é#"])
def test_the_database_of_mlflow_is_in_the_folder_of_a_run_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / name
    folder.mkdir()
    log(folder, "mlflow", range(1, 2))
    assert json.loads((folder / "mlflow.json").read_text())["step"] == 1
    assert (folder / "mlflow.db").is_file()
    assert not (tmp_path / "a").exists()


@needs_mlflow
def test_mlflow_takes_metrics_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of data sources and of parts of the reward are the user's."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    names = [
        "val/http://x.org/acc",
        "val/../acc",
        "val/\u6570\u5b66",
        "val/\u4ee3\u7801",
        "val/./b[0]",
        "/c/",
        "x" * 300,
    ]
    with Tracker(tmp_path, "t", 9, ["mlflow"]) as tracker:
        tracker.log(1, {name: float(i) for i, name in enumerate(names)})
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = client.get_run(json.loads((tmp_path / "mlflow.json").read_text())["id"]).data.metrics
    shown = ["val/http:/x.org/acc", "val/__/acc", "val/\u6570\u5b66", "val/\u4ee3\u7801", "val/_/b_0_", "c", "x" * 250]
    assert {name: found.get(name) for name in shown} == {name: float(i) for i, name in enumerate(shown)}


def fail(folder: Path, logger: str, error: Exception) -> None:
    """A run that logs a step and ends with ``error``."""
    with pytest.raises(type(error)), Tracker(folder, "t", 9, [logger]) as tracker:
        tracker.log(1, {"a": 1.0})
        raise error


@needs_mlflow
@pytest.mark.parametrize(("error", "status"), [(RunError("x"), "FAILED"), (Interrupted("x"), "FINISHED")])
def test_a_run_that_failed_has_failed_in_mlflow(
    error: Exception, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fail(tmp_path, "mlflow", error)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(json.loads((tmp_path / "mlflow.json").read_text())["id"]).info.status == status


@needs_wandb
def test_a_run_that_failed_has_failed_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    fail(tmp_path, "wandb", RunError("x"))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # as above
    while not (codes := [r.exit.exit_code for r in records(file) if r.WhichOneof("record_type") == "exit"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert codes == [1]


@needs_mlflow
def test_mlflow_that_is_gone_is_one_message_or_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"MLflow at http://127.0.0.1:9 did not start"):
        log(tmp_path, "mlflow", range(1, 2))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mssql+nothing://127.0.0.1/runs")
    with pytest.raises(ConfigError, match=r"MLflow at mssql\+nothing://127.0.0.1/runs did not start"):
        log(tmp_path, "mlflow", range(1, 2))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with Tracker(tmp_path, "t", 9, ["mlflow"]) as tracker:
        state = json.loads((tmp_path / "mlflow.json").read_text())
        (sink,) = tracker._sinks
        sink._state["id"] = "no such run"  # type: ignore[attr-defined]
        tracker.log(1, {"a": 1.0})
        tracker.log(2, {"a": 1.0})
    assert state["id"] != "no such run"
    assert capsys.readouterr().err.count("warning: MLflow: ") == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_an_error_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"run.logger = {name} needs the package {name}") as error:
        startup.check_machine(Config.model_validate({"command": "sft", "run": {"logger": [name]}}))
    assert error.value.hint == f"pip install 'posttrain[{name}]'"
    startup.check_machine(Config(command="sft"))
