"""The step of a run that samples while it trains."""

import pytest

from posttrain.plan.compare import compare
from posttrain.plan.estimate import Plan
from posttrain.plan.speed import Seconds
from posttrain.plan.table import as_data, render
from tests.unit.plan.test_plan import config, question


@pytest.mark.parametrize(("gen", "training"), [(7.0, 4.0), (3.0, 4.0)])
@pytest.mark.parametrize(("k", "placement"), [(0, "separate"), (1, "colocated"), (1, "separate")])
def test_sampling_and_training_overlap_where_they_are_asynchronous_and_on_gpus_of_their_own(
    k, placement, gen, training
):
    cfg = config("rl", rollout={"engine": "vllm", "staleness": k}, cluster={"placement": placement})
    found = Plan(question(cfg, gpus=2))
    seconds = {"gen": gen, "old_log_prob": 1.0, "update_actor": training - 1.0, "sync": 0.5}
    vars(found)["phases"] = {name: Seconds(fixed=s) for name, s in seconds.items()}
    overlapped = k == 1 and placement == "separate"
    assert found.step_seconds == pytest.approx(0.5 + (max(gen, training) if overlapped else gen + training))
    assert as_data(found, [])["overlap_seconds"] == (min(gen, training) if overlapped else 0.0)
    assert ("sampling while training" in render(found, [])) == overlapped


def test_an_asynchronous_step_is_as_long_as_the_longer_of_sampling_and_training_and_the_update_of_weights():
    separate = {"placement": "separate"}
    turns, found = (
        Plan(question(config("rl", rollout={"engine": "vllm", "staleness": k}, cluster=separate), gpus=2))
        for k in (0, 1)
    )
    assert turns.step_seconds == pytest.approx(sum(phase.total for phase in turns.phases.values()))
    gen, sync = found.phases["gen"].total, found.phases["sync"].total
    training = sum(phase.total for phase in found.phases.values()) - gen - sync
    assert found.step_seconds == pytest.approx(max(gen, training) + sync)


def test_what_trainers_wait_for_is_not_compared_with_the_time_of_sampling():
    measured = {"timing_s/gen": 0.1, "timing_s/update_actor": 2.0, "timing_s/step": 3.0}
    for k, names in ((0, ["timing_s/gen", "timing_s/update_actor"]), (1, ["timing_s/update_actor", "timing_s/step"])):
        cfg = config("rl", rollout={"engine": "vllm", "staleness": k}, cluster={"placement": "separate"})
        assert [pair.name for pair in compare(Plan(question(cfg, gpus=2)), [measured])] == names
