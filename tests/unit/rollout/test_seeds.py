"""Seeds of episodes: each has its own, which depends on nothing but the run's seed, the prompt and its number."""

import pytest

from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.rollout.window import Window
from tests.helpers.scripted import ON_POLICY, ScriptedSampler, environment, gsm8k_prompt

PROMPTS = [gsm8k_prompt(index=i) for i in range(3)]


async def seeds_of(seed, prompts=PROMPTS, drawn=None):
    sampler = ScriptedSampler(*["8"] * 2 * len(prompts))
    await TrajectorySource(SamplerPool([sampler]), environment(), seed=seed).sample(prompts, 2, drawn=drawn)
    return [params.seed for params in sampler.params]


async def test_every_episode_has_a_seed_of_its_own():
    found = await seeds_of(3)
    assert len(set(found)) == 6
    assert await seeds_of(3) == found
    assert not set(await seeds_of(4)) & set(found)


async def test_a_prompt_has_the_same_seeds_among_others():
    assert await seeds_of(3, PROMPTS[1:2]) == (await seeds_of(3))[2:4]


async def test_a_prompt_that_is_drawn_again_has_other_seeds():
    found = await seeds_of(3, [*PROMPTS, *PROMPTS], drawn=0)
    assert len(set(found)) == 12
    assert await seeds_of(3, PROMPTS, drawn=3) == found[6:]


async def test_without_a_seed_episodes_are_sampled_from_the_engines_stream():
    assert await seeds_of(None) == [None] * 6


@pytest.mark.parametrize("most", [1, 6])
async def test_seeds_do_not_depend_on_how_many_episodes_are_played_at_once(most):
    async def played(most):
        sampler = ScriptedSampler(*["8"] * 6)
        pool, found = SamplerPool([sampler]), []
        async with Window(pool, environment(), ON_POLICY, iter(PROMPTS), n=2, most=most, seed=3) as window:
            while not window.over:
                found += await window.finished(60.0)
        assert len(found) == 3
        return sorted(params.seed for params in sampler.params)

    assert await played(most) == await played(2)
    assert len(set(await played(most))) == 6
