"""A terminal task: the model works on files with a shell in the sandbox, and a hidden check gives the reward.
docs/environments.md says how to run it."""

import asyncio
import json
from collections.abc import Sequence

from posttrain.core.types import Message, Prompt
from posttrain.envs import ENVIRONMENTS, Environment, Split, Step
from posttrain.sandbox import Sandbox, open_sandbox
from posttrain.tools import function_schema

SETUP = """
import os, pathlib, subprocess, tempfile
os.chdir(tempfile.mkdtemp())
for name, text in {files}.items():
    pathlib.Path(name).write_text(text)
"""
COMMAND = """
done = subprocess.run({command}, shell=True, capture_output=True, text=True, timeout=10)
print(done.stdout[-2000:] + done.stderr[-2000:] + ("" if done.returncode == 0 else f"exit code {{done.returncode}}"))
"""
TASKS = [
    ("Write the number of lines of poem.txt to lines.txt.", {"poem.txt": "one\ntwo\nthree\n"}, "lines.txt", "3"),
    ("Sort names.txt into sorted.txt.", {"names.txt": "mo\nal\nzoe\n"}, "sorted.txt", "al\nmo\nzoe"),
    ("Copy the largest number of n.txt to max.txt.", {"n.txt": "4\n17\n9\n"}, "max.txt", "17"),
]


def shell(command: str) -> str:
    """Run a command of the shell, and return what it prints."""
    raise NotImplementedError(command)  # the environment runs it


@ENVIRONMENTS.register("terminal")
class Terminal(Environment):
    """The reward is 1 if the wanted file has the wanted text when the model stops to call ``shell``."""

    tools = (function_schema(shell),)
    sandbox: Sandbox | None = None

    def tasks(self, split: Split) -> Sequence[Prompt]:
        rows = [([{"role": "user", "content": said}], json.dumps(check)) for said, *check in TASKS]
        return [Prompt(i, messages, "terminal", truth) for i, (messages, truth) in enumerate(rows)]

    async def reset(self, task: Prompt, seed: int) -> list[Message]:
        self.files, self.wanted, self.text = json.loads(task.ground_truth)
        self.sandbox = await asyncio.to_thread(open_sandbox)
        self.session = self.sandbox.session()
        await self._run(SETUP.format(files=repr(self.files)))
        return task.messages

    async def step(self, message: Message) -> Step:
        if calls := message.get("tool_calls"):
            commands = [str(call["function"]["arguments"].get("command", "")) for call in calls]
            texts = [await self._run(COMMAND.format(command=repr(command))) for command in commands]
            return Step([{"role": "tool", "name": "shell", "content": text} for text in texts])
        found = await self._run(f"print(pathlib.Path({self.wanted!r}).read_text())")
        return Step(reward=float(found.strip() == self.text), done=True)

    async def _run(self, code: str) -> str:
        result = await asyncio.to_thread(self.session.run, code)
        return result.stdout.strip() or result.stderr[-500:] or "(no output)"

    async def close(self) -> None:
        if self.sandbox is not None:
            await asyncio.to_thread(self.sandbox.close)
