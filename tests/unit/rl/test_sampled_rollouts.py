"""The episodes of a checkpoint that a run goes on with."""

import json
from types import SimpleNamespace

import pytest

from posttrain.config.presets import resolve
from posttrain.rl.sampling import IN_FLIGHT, SampledRollouts
from posttrain.rollout.files import write_rollouts
from tests.helpers.recorded import trajectory


def config(*sets):
    return resolve("rl", "tiny-gsm8k", sets).config


class Batches:
    def resume(self, state, in_flight):
        self.resumed = in_flight


@pytest.fixture
def state(tmp_path):
    """That of a checkpoint with a group of two episodes, of a run with two episodes a prompt."""
    meta = {"config": config("rollout.n=2").model_dump(mode="json")}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    groups = [[trajectory(0, 1.0), trajectory(0, 0.0)]]
    write_rollouts(tmp_path / IN_FLIGHT, groups, kind="train", step=0, temperature=1.0, tokenizer="t")
    return {"checkpoint": str(tmp_path), "in_flight": [[0, ["played", "played"], [0, 1]]]}


def resumed(state, *sets):
    """What the batches of a run get, and what it notes."""
    notes, batches = [], Batches()
    run = SimpleNamespace(cfg=config(*sets), tracker=SimpleNamespace(note=notes.append))
    writer = SimpleNamespace(tokenizer="t", drop_after=lambda step: None)
    SampledRollouts(run, None, None, batches, writer).resume(3, state)
    return batches.resumed, notes


def test_a_run_goes_on_with_the_episodes_of_its_checkpoint(state):
    [group], notes = resumed(state, "rollout.n=2", "rollout.replicas=2")
    assert [t.reward for t in group] == [1.0, 0.0]
    assert notes == []


def test_episodes_that_would_be_played_otherwise_begin_anew(state):
    played, notes = resumed(state, "rollout.n=4")
    assert played is None
    assert notes == ["the groups that were played at the checkpoint, 1, begin anew: rollout.n: 2 -> 4"]
