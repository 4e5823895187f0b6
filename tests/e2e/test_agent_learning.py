"""The tiny model learns from an agent that talks to the endpoint with the client of OpenAI."""

import json
from statistics import fmean

import pytest

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.rl import command as rl

AGENT = '''
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from posttrain.core.types import Prompt


async def vowels(task):
    """Two turns; the reward is the share of vowels in what the model says."""
    messages = list(task.messages)
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, http_client=http) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "Again."}]
    said = "".join(m["content"] for m in messages if m["role"] == "assistant")
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))


vowels.tasks = lambda split: [Prompt(i, [{"role": "user", "content": "Sing."}], "song", "") for i in range(8)]
'''


@pytest.mark.slow
def test_the_tiny_model_learns_from_an_agent_at_the_endpoint(tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(AGENT)
    flags = {
        "model.path": "builtin:tiny", "rollout.agent": f"{tmp_path / 'agent.py'}:vowels", "rollout.n": 8,
        "rollout.max_turns": 2, "rollout.max_response_tokens": 48, "rollout.engine": "hf", "data.batch_size": 8,
        "train.steps": 12, "train.optim.lr": 2e-2, "train.optim.weight_decay": 0.0, "run.dir": str(tmp_path),
        "run.name": "vowels", "run.seed": 0, "rollout.max_prompt_tokens": 64,
    }  # fmt: skip
    with local_ray():
        rl.run(resolve("rl", "tiny-gsm8k", [], flags | {"data.train": "", "data.val": "", "rollout.tools": []}))
    steps = [json.loads(line) for line in (tmp_path / "vowels" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/env/mean"] for step in steps]
    assert len(rewards) == 12
    assert sum(step["rollout/failed"] + step["rollout/unmatched_requests"] for step in steps) == 0
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.15, rewards
