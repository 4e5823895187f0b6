"""A reward model in a process of its own, as the driver sees it."""

import asyncio
import os

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen2ForSequenceClassification

from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config, RewardModelConfig
from posttrain.core.errors import DeadlineError, ModelError, WorkerError
from posttrain.core.types import Prompt, Trajectory
from posttrain.models.builtin import builtin_config, builtin_tokenizer
from posttrain.models.reward import RewardModel
from posttrain.rewards.base import EpisodeScorer

pytestmark = pytest.mark.slow

TEMPLATE = "{% if messages|length > 9 %}{{ raise_exception('too many turns') }}{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random reward model, saved without a pad token, whose template refuses conversations of ten messages."""
    torch.manual_seed(3)
    config = builtin_config("tiny")
    config.update({"num_labels": 1})
    config.pad_token_id = None
    model = Qwen2ForSequenceClassification(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("reward")
    model.save_pretrained(folder)
    tokenizer = builtin_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE + str(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cluster():
    with local_ray():
        cluster = Cluster(Config.model_validate({"command": "rl", "cluster": {"device": "cpu"}}))
        asyncio.run(cluster.__aenter__())
        yield cluster
        asyncio.run(cluster.__aexit__(None, None, None))


def config(folder, **values):
    return RewardModelConfig(path=str(folder), **{"max_length": 256, "tokens_per_batch": 1024, **values})


def episode(words, turns=1):
    prompt = Prompt(0, [{"role": "user", "content": "What is 2 + 2?"}], "test/source", "4")
    answer = {"role": "assistant", "content": " ".join(["four"] * words)}
    empty = np.zeros(0)
    return Trajectory(
        prompt=prompt,
        tokens=empty.astype(np.int32),
        loss_mask=empty.astype(np.bool_),
        logprobs=empty.astype(np.float32),
        weight_version=empty.astype(np.int32),
        messages=[*prompt.messages, *([answer] * turns)],
        stop_reason="stop",
        turns=turns,
        tool_calls=0,
        seconds=0.0,
        prompt_length=0,
    )


async def test_scores_of_episodes(cluster, folder):
    model: EpisodeScorer = await cluster.reward_model(config(folder))
    assert model.name == "model"
    episodes = [episode(n) for n in (3, 50, 400, 1)] + [episode(2, turns=10), episode(9)]
    scores = await model.score(episodes)
    assert [s.error is None for s in scores] == [True, True, False, True, False, True]
    assert "reward.model.max_length is 256" in scores[2].error
    assert "too many turns" in scores[4].error
    here = RewardModel(str(folder), "cpu", torch.float32, max_length=256, tokens_per_batch=1024)
    for score, one in zip(scores, episodes, strict=True):
        (expected,) = here.score([one.messages])
        assert score.error == expected.error
        assert score.score == pytest.approx(expected.score, abs=1e-5)
    assert len({s.score for s in scores if s.error is None}) == 4
    assert await model.score([]) == []
    # Calls at the same time keep their answers apart.
    several = await asyncio.gather(*(model.score([e]) for e in episodes))
    assert [s.error for (s,) in several] == [s.error for s in scores]
    assert [s.score for (s,) in several] == pytest.approx([s.score for s in scores], abs=1e-5)
    await model.close()
    with pytest.raises(WorkerError, match="reward model died"):
        await asyncio.wait_for(model.score(episodes), 30)
    await model.close()


async def test_a_model_that_is_none_says_so(cluster, folder):
    with pytest.raises(ModelError, match="no reward model but a language model"):
        await cluster.reward_model(config("builtin:tiny"))
    with pytest.raises(ValidationError, match=r"holds no conversation of reward\.model\.max_length = 2048"):
        config(folder, max_length=2048)


async def test_a_process_that_dies_is_a_failure_of_the_run(cluster, folder):
    model = await cluster.reward_model(config(folder))
    model.actor.__ray_call__.remote(lambda self: os._exit(1))
    with pytest.raises(WorkerError, match="reward model died during score"):
        await asyncio.wait_for(model.score([episode(3)]), 30)


async def test_a_process_that_hangs_misses_its_deadline(cluster, folder):
    model = await cluster.reward_model(config(folder))
    model.deadline_s = 0.5
    model.actor.__ray_call__.remote(lambda self: __import__("time").sleep(60))
    with pytest.raises(DeadlineError, match=r"reward model did not finish score within 0\.5 s"):
        await asyncio.wait_for(model.score([episode(3)]), 30)
    await model.close()


async def test_leaving_the_cluster_ends_the_process(folder):
    async with Cluster(Config.model_validate({"command": "rl", "cluster": {"device": "cpu"}})) as own:
        model = await own.reward_model(config(folder))
        pid = await model.actor.__ray_call__.remote(lambda self: os.getpid())
        os.kill(pid, 0)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"process {pid} is still there")
