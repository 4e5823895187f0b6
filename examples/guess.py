"""A text game of several turns: find a hidden number by hints. docs/environments.md says how to run it.

``play`` is the same game as an agent, with the client of OpenAI (docs/agents.md).
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from posttrain.core.types import Message, Prompt
from posttrain.envs import ENVIRONMENTS, Environment, Split, Step
from posttrain.envs.agents import AgentTask


@ENVIRONMENTS.register("guess")
class Guess(Environment):
    """Guess a number from 1 to ``highest``.

    Args:
        highest: the largest number that may be hidden.
        guesses: turns until the game is lost.
    """

    def __init__(self, *, highest: int = 3, guesses: int = 2) -> None:
        self.highest, self.left, self.hidden = highest, guesses, 0

    def tasks(self, split: Split) -> Sequence[Prompt]:
        question = f"I think of a number from 1 to {self.highest}. Which?"
        count = 64 if split == "train" else 16
        return [Prompt(i, [{"role": "user", "content": question}], "guess", split) for i in range(count)]

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        self.hidden = random.Random(f"{task.ground_truth} {seed}").randint(1, self.highest)
        return task.messages

    async def step(self, message: Message) -> Step:
        self.left -= 1
        numbers = re.findall(r"\d+", message["content"])
        if numbers and int(numbers[-1]) == self.hidden:
            return Step(reward=1.0, done=True)
        if not self.left:
            return Step(done=True)
        if not numbers:
            return Step([{"role": "user", "content": "Say a number."}])
        hint = "higher" if int(numbers[-1]) < self.hidden else "lower"
        return Step([{"role": "user", "content": f"No, {hint}."}])


async def play(task: AgentTask) -> float:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    game, reward = Guess(), 0.0
    row = Prompt(task.index, task.messages, "guess", task.ground_truth)
    messages: list[Any] = [*await game.reset(row, task.seed)]
    http = DefaultAsyncHttpxClient(verify=False)  # certificates, of no use on loopback, take 20 ms to read
    async with AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, http_client=http) as client:
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            choice = answer.choices[0]
            if choice.finish_reason == "length":  # an episode ends there, too
                return reward
            said: Message = {"role": "assistant", "content": choice.message.content or ""}
            step = await game.step(said)
            reward += step.reward
            if step.done:
                return reward
            messages += [said, *step.messages]


play.tasks = Guess().tasks  # type: ignore[attr-defined]
