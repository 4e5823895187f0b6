"""Groups that an agent plays at a running endpoint, over a sampler that says what a test tells it to."""

import dataclasses

from posttrain.config import RewardConfig
from posttrain.envs.play import SessionPlayer
from posttrain.envs.session import TokenRenderer
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rollout.agents import AgentHost
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.tools.formats import PARSERS
from tests.helpers.scripted import EOS, TOKENIZER, ScriptedSampler, environment, gsm8k_prompt

RENDERER = TokenRenderer(TOKENIZER, PARSERS.get("hermes"), frozenset({EOS}))


async def play(agent, *turns, n=1, prompt=None, reward=None, processes=None, seed=None, **cfg):
    """Return the graded group of one prompt that an agent plays."""
    env = environment(agent="mine", **cfg)
    player = processes or SessionPlayer(agent, RENDERER, env.cfg)
    async with player:
        env = dataclasses.replace(env, agents=AgentHost(agent, player))
        limits = RewardConfig(**reward or {})
        source = TrajectorySource(
            SamplerPool([ScriptedSampler(*turns)]), env, Rewarder(limits, GraderPool(limits), 400)
        )
        [group] = await source.sample([prompt or gsm8k_prompt()], n, seed=seed)
        return group, source
