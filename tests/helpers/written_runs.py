"""Run folders as `posttrain rl` leaves them, with episodes that nobody sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from posttrain.config.presets import resolve
from posttrain.core.types import Message, Prompt, Sample, Trajectory
from posttrain.data.chat import render_prompt
from posttrain.envs.session import TokenRenderer, TokenSession
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.rollout.advantage_files import advantages_file, write_advantages
from posttrain.rollout.files import fingerprint, write_rollouts
from posttrain.runs.run import RunTarget, Status
from posttrain.tools.formats import PARSERS

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202egnissim\u202c \x1b[31mred\x07 &lt; 'é🙂"
TOKENIZER = load_tokenizer(ModelSource("builtin:tiny"))
RENDERER = TokenRenderer(TOKENIZER, PARSERS.get("hermes"), frozenset({int(TOKENIZER.eos_token_id)}))


def episode(number: int, reward: float, answer: str = "", step: int = 1, words: int = 8) -> Trajectory:
    """One with a tool call and a second turn, its tokens as an engine would have sampled them."""
    rng = np.random.default_rng(number)
    prompt: list[Message] = [{"role": "user", "content": f"Sam has {number} apples. How many?"}]
    said = answer or " ".join(str(n) for n in rng.integers(0, 999, words))
    call = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "6"}}\n</tool_call>'
    turns: list[tuple[list[int], bool]] = [(list(render_prompt(prompt, TOKENIZER, None)), False)]
    for text, own in ((f"{said}\n{call}", True), ("answer=6 reward=1.0", False), ("#### 6", True)):
        turns.append((TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False), own))
    ids = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in turns])
    mask = np.concatenate([np.full(len(tokens), own) for tokens, own in turns])
    return Trajectory(
        prompt=Prompt(number, prompt, "posttrain/arith", "6", {}),
        tokens=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.7, len(ids)), 0.0).astype(np.float32),
        weight_version=np.where(mask, step - 1, -1).astype(np.int32),
        messages=[
            *prompt,
            {"role": "assistant", "content": f"{said}\n{call}"},
            {"role": "tool", "name": "calc_gsm8k_reward", "content": "answer=6 reward=1.0"},
            {"role": "assistant", "content": "#### 6"},
        ],
        stop_reason="stop",
        turns=2,
        tool_calls=1,
        seconds=0.5,
        prompt_length=len(turns[0][0]),
        reward=reward,
        reward_parts={"score": reward, "format": 1.0},
        correct=reward > 0.5,
        extracted="6",
        advantages=np.where(mask, reward - 0.5, 0.0).astype(np.float32),
    )


def branched(reward: float, *, error: str | None = None) -> list[Trajectory]:
    """The branches of an agent's episode, as the endpoint records them: a sub-agent, the agent's own two turns, and one
    more answer after its first turn, which is the last."""
    session = TokenSession(RENDERER)

    def ask(messages: list[Message], said: str) -> list[Message]:
        asked = session.asked(messages)
        ids = [*TOKENIZER.encode(said, add_special_tokens=False), int(TOKENIZER.eos_token_id)]
        return [*messages, session.sampled(asked, [Sample(ids, [-0.5] * len(ids), "stop", 0)])]

    ask([{"role": "user", "content": "a question of a sub-agent"}], "sub")
    first = ask([{"role": "user", "content": "What is 3 + 5?"}], "one")
    ask([*first, {"role": "user", "content": "more"}], "two")
    ask([*first, {"role": "user", "content": "Again, please."}], "three")
    rows = []
    for number, branch in enumerate(session.branches[::-1]):
        columns = branch.record.columns()
        prompt = Prompt(0, branch.messages[: branch.given], "posttrain/arith", "6", {})
        of_branch = replace(episode(0, reward), prompt=prompt, messages=branch.messages, branch=number, error=error)
        advantages = np.where(columns["loss_mask"], reward - 0.5, 0.0).astype(np.float32)
        of_branch.advantages = None if error else advantages
        rows.append(replace(of_branch, prompt_length=branch.prompt_length, **columns))
    return rows


def write_run(
    root: Path,
    name: str,
    steps: Sequence[Sequence[Sequence[Trajectory]]],
    sets: Sequence[str] = (),
    seed: int = 0,
    status: Status = "finished",
) -> Path:
    """A run that ended so, whose step k had the groups ``steps[k - 1]``."""
    flags = {"run.dir": str(root), "run.name": name, "run.seed": seed, "model.path": "builtin:tiny"}
    folder = RunTarget.find(resolve("rl", "tiny-arith", list(sets), flags)).open()
    lines = []
    for step, groups in enumerate(steps, start=1):
        file = folder.path / "rollouts" / f"step_{step:06}.parquet"
        if groups:
            write_rollouts(file, groups, kind="train", step=step, temperature=1.0, tokenizer=fingerprint(TOKENIZER))
            write_advantages(advantages_file(file), groups)
        rewards = [t.reward for group in groups for t in group] or [0.0]
        row = {"step": step, "time": float(step), "critic/score/mean": float(np.mean(rewards)), "actor/entropy": "nan"}
        row |= {
            "timing_s/gen": 1.0,
            "timing_s/update_actor": 0.5,
            "timing_s/step": 1.75,
            "rollout_gap/below/1e-06": 0.5,
        }
        lines.append(json.dumps(row | {"rollout_gap/below/0.001": 1.0}))
    (folder.path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "torn']))
    folder.finish(status)
    return folder.path


def many(steps: int, groups: int, n: int, words: int = 8) -> list[list[list[Trajectory]]]:
    """Episodes by step and group; the first of every tenth step failed. At most 500 are different in their words."""
    base = [episode(number, 0.0, words=words) for number in range(min(groups * n, 500))]
    made = []
    for step in range(1, steps + 1):

        def of(group: int, i: int, step: int = step) -> Trajectory:
            drawn, reward = base[(group * n + i + step - 1) % len(base)], float((group + i + step) % 3 == 0)
            mask = drawn.loss_mask
            return replace(
                drawn,
                reward=reward,
                correct=reward > 0.5,
                weight_version=np.where(mask, step - 1, -1).astype(np.int32),
                advantages=np.where(mask, reward - 0.5, 0.0).astype(np.float32),
            )

        of_step = [[of(group, i) for i in range(n)] for group in range(groups)]
        if step % 10 == 0:
            of_step[0][0].error, of_step[0][0].stop_reason = "RunError: engine gone", "error"
        made.append(of_step)
    return made
