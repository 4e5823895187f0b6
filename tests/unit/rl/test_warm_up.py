"""What the models of a run do while engines sample the first rollouts."""

import asyncio
from types import SimpleNamespace

import pytest

from posttrain.config import Config
from posttrain.core.errors import WorkerError
from posttrain.rl.learner import Learner


class Group:
    """A trained model; two of them must warm up at the same time."""

    def __init__(self, barrier, error=None):
        self.barrier, self.error, self.warm = barrier, error, False

    async def warm_up(self, *, scores):
        self.scores = scores
        await self.barrier.wait()
        if self.error is not None:
            raise self.error
        self.warm = True


def learner(sections, error=None):
    cfg = Config.model_validate({"command": "rl", **sections})
    barrier = asyncio.Barrier(2)
    actor, critic, frozen = Group(barrier), Group(barrier, error), object()
    return Learner(SimpleNamespace(cfg=cfg), actor, critic, frozen, None, None), actor, critic


async def test_all_that_are_trained_warm_up_together():
    made, actor, critic = learner({})
    await asyncio.wait_for(made.warm_up(), 60.0)
    assert actor.warm
    assert critic.warm
    assert (actor.scores, critic.scores) == (False, True)


async def test_the_actor_warms_up_the_pass_before_its_updates_where_there_is_one():
    made, actor, _ = learner({"algo": {"updates_per_step": 2}})
    await asyncio.wait_for(made.warm_up(), 60.0)
    assert actor.scores


@pytest.mark.parametrize("sections", [{"rollout": {"sleep": True}}, {"train": {"offload": True}}])
async def test_none_does_where_trainers_leave_the_gpus_to_engines(sections):
    made, actor, critic = learner(sections)
    await made.warm_up()
    assert not actor.warm
    assert not critic.warm


async def test_a_worker_that_is_lost_in_it_is_told_of():
    made, *_ = learner({}, WorkerError("critic worker 0 died"))
    with pytest.raises(WorkerError, match="critic worker 0 died"):
        await asyncio.wait_for(made.warm_up(), 60.0)
