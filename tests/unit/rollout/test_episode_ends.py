"""Where an episode stops at a limit or is cancelled, and what is told of one that goes wrong in two ways."""

import asyncio

import pytest

from posttrain.core.errors import WorkerError
from posttrain.core.types import Sample
from posttrain.rollout.episode import Episode
from tests.helpers.scripted import Gsm8kTool, ScriptedSampler, call, environment, gsm8k_prompt, run_episode, tokens
from tests.unit.rollout.test_episode import Probe, User, with_user


@pytest.mark.parametrize(("spare", "reason"), [(0, "stop"), (-1, "prompt_too_long")])
async def test_a_prompt_may_be_as_long_as_the_limit(spare, reason):
    length = len(environment().prompt_ids(gsm8k_prompt()))
    env = environment(max_prompt_tokens=length + spare)
    assert (await run_episode(gsm8k_prompt(), ScriptedSampler("8"), env)).stop_reason == reason


async def test_an_episode_that_is_played_on_has_the_time_that_is_left():
    episode = Episode(gsm8k_prompt(), environment(episode_deadline_s=60.0))
    episode.seconds = 60.0
    played = await episode.play(ScriptedSampler(600.0, "8"))
    assert played.stop_reason == "deadline"
    assert played.seconds < 90.0


async def test_the_error_of_an_episode_is_not_hidden_by_that_of_its_tool():
    class Broken(Gsm8kTool):
        async def release(self, state):
            raise ValueError("it broke")

    env = environment(Broken())
    played = await run_episode(gsm8k_prompt(), ScriptedSampler(call(), WorkerError("the engine died")), env)
    assert played.error == "WorkerError: the engine died"
    played = await run_episode(gsm8k_prompt(), ScriptedSampler("8"), env)
    assert "it broke" in played.error


async def test_a_timeout_that_is_not_the_episodes_is_no_deadline_of_it():
    with pytest.raises(asyncio.TimeoutError):
        await run_episode(gsm8k_prompt(), ScriptedSampler(TimeoutError()), environment())


async def test_a_turn_that_an_engine_ends_without_a_stop_token_keeps_its_last_token():
    class WithoutStop(ScriptedSampler):
        async def generate(self, prompt_ids, params, images=()):
            return Sample(tokens("It is 8"), [-0.5] * len(tokens("It is 8")), "stop", 0)

    played = await run_episode(gsm8k_prompt(), WithoutStop(), environment())
    assert played.messages[-1]["content"] == "It is 8"


@pytest.mark.parametrize("turns", range(8))
async def test_an_episode_that_is_cancelled_just_as_a_state_is_made_releases_it(turns):
    """``turns`` of the event loop after it began."""
    made, released = [], []

    class Made(Probe):
        async def create(self, prompt):
            await asyncio.sleep(0)
            made.append("tool")
            return {"of": self.name}

        async def release(self, state):
            released.append("tool")

    class MadeUser(User):
        def create(self, prompt):
            made.append("user")

        async def release(self, state):
            released.append("user")

    episode = Episode(gsm8k_prompt(), with_user(MadeUser(), Made()))
    task = asyncio.create_task(episode.play(ScriptedSampler(60.0, "late")))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await episode.release()
    assert released == made
