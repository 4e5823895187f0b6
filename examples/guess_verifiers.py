"""The game of guess.py as an environment of the package verifiers, as its users write them. docs/environments.md says
how to run it."""

import random
import re

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = re.findall(r"\d+", messages[-1]["content"] or "")
        if said and int(said[-1]) == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        if not said:
            return [{"role": "user", "content": "Say a number."}]
        hint = "higher" if int(said[-1]) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"No, {hint}."}]


def found(completion, answer):
    turns = [message["content"] or "" for message in completion if message["role"] == "assistant"]
    said = re.findall(r"\d+", turns[-1]) if turns else []  # an answer without words is no turn of verifiers
    return float(said[-1:] == [answer])


def load_environment(highest: int = 3, guesses: int = 2, **kwargs) -> vf.Environment:
    question = f"I think of a number from 1 to {highest}. Which?"
    hidden = [random.Random(i).randint(1, highest) for i in range(80)]
    rows = [{"question": question, "answer": str(number)} for number in hidden]
    return Guess(
        dataset=Dataset.from_list(rows[:64]),
        eval_dataset=Dataset.from_list(rows[64:]),
        rubric=vf.Rubric(funcs=[found]),
        max_turns=guesses,
        **kwargs,
    )
