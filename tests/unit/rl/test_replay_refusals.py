"""What a replay and a run of `--rollout-only` refuse before anything is written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, PosttrainError
from posttrain.models.builtin import builtin_tokenizer
from posttrain.rl import command as rl
from posttrain.rl.replay import RecordedRollouts, prepare, replayed_steps
from posttrain.rollout.files import RolloutFiles, fingerprint, write_rollouts
from posttrain.runs.preflight import check_machine, check_supported
from posttrain.runs.run import RunTarget
from posttrain.tracking.tracker import Tracker
from tests.helpers.recorded import trajectory

TOKENIZER = fingerprint(builtin_tokenizer("tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three recorded steps, numbered 2, 4 and 6, as the rewards of their first episodes are."""
    for step in (2, 4, 6):
        groups = [[trajectory(0, float(step)), trajectory(0, 0.0)]]
        path = tmp_path / "rollouts" / f"step_{step:06}.parquet"
        write_rollouts(path, groups, kind="train", step=step, temperature=1.0, tokenizer=TOKENIZER)
    return tmp_path / "rollouts"


def replay(tmp_path: Path, paths: Path | str, *sets: str) -> None:
    flags = {"run.dir": str(tmp_path / "runs"), "run.name": "r", "rollout.replay": str(paths)}
    rl.run(resolve("rl", "tiny-arith", sets=["model.path='builtin:tiny'", "train.steps=1", *sets], flags=flags))


def test_a_replay_names_what_it_does_not_read_of_the_command_line(folder: Path) -> None:
    sets = ["model.path='builtin:tiny'", "train.steps=1", "rollout.n=4", "reward.weights.length=1.0", "val.n=2"]
    flags = {"rollout.replay": str(folder), "rollout.temperature": 1.0}
    notes = list(prepare(resolve("rl", "tiny-arith", sets=sets, flags=flags)).notes())
    what = "not used: rollout.n, val.n, reward.weights.length: rollout files hold what was sampled, with its rewards"
    assert [note for note in notes if "rollout files" in note] == [what]


def test_replay_rejects_missing_files(tmp_path: Path) -> None:
    with pytest.raises(PosttrainError, match=r"none\.parquet: no such file"):
        replay(tmp_path, tmp_path / "none.parquet")
    assert not (tmp_path / "runs").exists()


def test_replay_rejects_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(PosttrainError, match=r"no \.parquet file in this folder") as error:
        replay(tmp_path, tmp_path)
    assert "posttrain rl" in str(error.value.hint)
    assert not (tmp_path / "runs").exists()


def test_replay_rejects_token_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    foreign = trajectory(tokens=np.array([1, 2, 3, 151_643, 5, 6], dtype=np.int32))
    path = tmp_path / "t.parquet"
    write_rollouts(path, [[foreign]], kind="train", step=1, temperature=1.0, tokenizer=TOKENIZER)
    with pytest.raises(PosttrainError, match=r"t\.parquet: row 0, column 'tokens': 151643 is no token of the model"):
        replay(tmp_path, path)
    assert not (tmp_path / "runs").exists()


def test_replay_rejects_rollouts_of_another_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_rollouts(path, [[trajectory()]], kind="train", step=1, temperature=1.0, tokenizer="another")
    with pytest.raises(PosttrainError, match=r"t\.parquet: sampled with another tokenizer"):
        replay(tmp_path, path)
    assert not (tmp_path / "runs").exists()


def test_replay_rejects_more_steps_than_were_recorded(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps = 7, and .* hold 6 steps in 2 epochs") as error:
        replay(tmp_path, folder, "train.steps=7", "train.epochs=2")
    assert "--steps 6" in str(error.value.hint)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overwrite", "message"),
    [
        ("true", r"step_000002\.parquet lies in the folder of this run"),
        ("false", r"rollout\.replay: '' -> "),  # the run that is there is another one
    ],
)
def test_replay_does_not_delete_the_files_that_it_reads(
    tmp_path: Path, folder: Path, overwrite: str, message: str
) -> None:
    flags = {"run.dir": str(tmp_path / "runs"), "run.name": "r", "run.overwrite": overwrite == "true"}
    run = RunTarget.find(resolve("rl", "tiny-arith", flags=flags)).open()
    run.finish("failed")
    own = folder.rename(run.path / "rollouts")
    with pytest.raises(ConfigError, match=message):
        replay(tmp_path, own, f"run.overwrite={overwrite}")
    assert len(list(own.iterdir())) == 3


def test_replay_rejects_another_temperature(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampled at temperature 1, and rollout\.temperature = 0\.5") as error:
        replay(tmp_path, folder, "rollout.temperature=0.5")
    assert error.value.hint == "--set rollout.temperature=1"


@pytest.mark.parametrize(("steps", "epochs", "expected"), [(None, 1, 3), (None, 2, 6), (2, 1, 2), (3, 1, 3), (6, 2, 6)])
def test_replay_counts_steps_over_epochs(folder: Path, steps: int | None, epochs: int, expected: int) -> None:
    cfg = Config.model_validate({"command": "rl", "train": {"steps": steps, "epochs": epochs}})
    assert replayed_steps(RolloutFiles(str(folder), vocabulary=1000, tokenizer=TOKENIZER), cfg) == expected


def test_replay_begins_again_after_the_last_recorded_step(folder: Path) -> None:
    run: Any = SimpleNamespace(tracker=Tracker(None, "test", 1, []))
    rollouts = RecordedRollouts(run, RolloutFiles(str(folder), tokenizer=TOKENIZER))
    rewards = [asyncio.run(rollouts.next_batch(step)).groups[0][0].reward for step in range(1, 6)]
    assert rewards == [2.0, 4.0, 6.0, 2.0, 4.0]


def test_replay_does_not_go_on_with_another_number_of_recorded_steps(folder: Path) -> None:
    run: Any = SimpleNamespace()
    state = RecordedRollouts(run, RolloutFiles(str(folder), tokenizer=TOKENIZER)).state()
    (folder / "step_000004.parquet").unlink()
    fewer = RecordedRollouts(run, RolloutFiles(str(folder), tokenizer=TOKENIZER))
    with pytest.raises(DataError, match="was made with 3 recorded steps; now there are 2"):
        fewer.resume(1, state)
    fewer.resume(0, None)
    fewer.resume(1, fewer.state())


def test_replay_ignores_limits_of_engines() -> None:
    rollout = {"engine": "hf", "replay": "x", "tensor_parallel": 4, "n": 1, "kv_tokens": 64}
    changes = {"data": {"batch_size": 3}, "algo": {"updates_per_step": 2}, "cluster": {"workers": 2, "device": "cpu"}}
    cfg = Config.model_validate({"command": "rl", "rollout": rollout, **changes})
    check_supported(cfg)
    check_machine(cfg)
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel = 4"):
        check_supported(cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"replay": ""})}))


def test_rollout_only_ignores_limits_of_trainers() -> None:
    rollout = {"engine": "hf", "only": True, "n": 1, "temperature": 0.0}
    changes = {"train": {"sequence_parallel": 2}, "cluster": {"workers": 2}, "data": {"batch_size": 3}}
    check_supported(Config.model_validate({"command": "rl", "rollout": rollout, **changes}))
    with pytest.raises(ConfigError) as error:
        check_supported(Config.model_validate({"command": "rl", "rollout": {**rollout, "tensor_parallel": 2}}))
    assert "rollout.tensor_parallel = 2 with rollout.engine 'hf'" in error.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"only": True, "replay": "x"}}, "exclude each other"),
        ({"rollout": {"only": True}, "run": {"rollouts": False}}, "would leave nothing behind"),
        ({"rollout": {"only": True}, "run": {"rollouts_every": 2}}, "would leave nothing behind"),
    ],
)
def test_rejects_contradicting_rollout_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"command": "rl", **changes})


def test_flags_set_replay_and_rollout_only(tmp_path: Path) -> None:
    resolved = resolve("rl", "tiny-arith", flags={"rollout.only": True, "rollout.replay": None})
    assert resolved.provenance["rollout.only"] == "flag --rollout-only"
    resolved = resolve("rl", "tiny-arith", flags={"rollout.replay": "t.parquet"})
    assert resolved.provenance["rollout.replay"] == "flag --replay"
