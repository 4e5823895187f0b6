"""A sampler that says what a test tells it to, and the parts around it. Its tokens are real ones of the tiny model."""

import asyncio

from posttrain.config import RolloutConfig
from posttrain.core.types import ON_POLICY, Prompt, Sample
from posttrain.data.chat import ChatDeltas
from posttrain.models.builtin import builtin_tokenizer
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.episode import Episode
from posttrain.tools.formats import PARSERS
from posttrain.tools.gsm8k import Gsm8kTool

TOKENIZER = builtin_tokenizer("builtin:tiny")
EOS = TOKENIZER.eos_token_id


def call(answer="8", name="calc_gsm8k_reward"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"answer": "{answer}"}}}}\n</tool_call>'


def tokens(text):
    return TOKENIZER(text)["input_ids"]


class ScriptedSampler:
    """Implements ``Sampler``. Each turn is a text, an exception to raise, or seconds to wait before the next one.

    A text ends with the end-of-turn token; one that does not fit is cut off. Versions count the requests.
    """

    def __init__(self, *turns):
        self.turns = list(turns)
        self.prompts = []
        self.params = []

    async def generate(self, prompt_ids, params, images=()):
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, float):
            await asyncio.sleep(turn)
            turn = self.turns.pop(0)
        ids = [*tokens(turn), EOS]
        cut = ids[: params.max_new_tokens]
        version = len(self.prompts) + 10
        reason = "stop" if cut == ids else "length"
        return Sample(cut, [-(i + 1) / 8 for i in range(len(cut))], reason, version)

    async def score(self, sequences):
        raise NotImplementedError

    async def close(self):
        pass


def environment(*tools, **cfg):
    by_name = {tool.name: tool for tool in tools}
    return EpisodeContext(
        tokenizer=TOKENIZER,
        stop_token_ids=frozenset({EOS}),
        tools=by_name,
        parser=PARSERS.get("hermes"),
        deltas=ChatDeltas(TOKENIZER, [tool.schema for tool in tools] or None),
        cfg=RolloutConfig(**{"max_turns": 4, "max_response_tokens": 400} | cfg),
    )


def gsm8k_prompt(question="What is 3 + 5?", truth="8", index=0, source="openai/gsm8k"):
    return Prompt(index, [{"role": "user", "content": question}], source, truth)


__all__ = ["EOS", "TOKENIZER", "Gsm8kTool", "ScriptedSampler", "call", "environment", "gsm8k_prompt", "tokens"]


async def run_episode(prompt, sampler, env, sampling=ON_POLICY):
    """Play one episode to its end. If it is cancelled, its tools are released."""
    episode = Episode(prompt, env, sampling)
    try:
        return await episode.play(sampler)
    finally:
        await episode.release()
