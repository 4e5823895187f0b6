"""The embedded engine with images: it samples from what the trainer computes, and no token of an image."""

import asyncio
from dataclasses import replace

import pytest
import torch
import transformers

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError
from posttrain.core.types import SamplingParams
from posttrain.data.chat import ChatDeltas
from posttrain.engines.base import EngineSpec
from posttrain.engines.hf import HFSampler
from posttrain.models import vision
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.models.processors import load_vision
from posttrain.rl.batch import pack
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.interaction import Interaction, UserTurn
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn, ToolParser
from posttrain.tools.zoom import Zoom
from tests.helpers.scripted import run_episode
from tests.helpers.seeing import FAMILIES, picture, prompts, save_model, trainer_logprobs

ROLLOUT = RolloutConfig(engine="hf", max_prompt_tokens=256, max_response_tokens=32)
STOP = 0


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


def context(source):
    tokenizer = load_tokenizer(source)
    return EpisodeContext(
        tokenizer, frozenset({STOP}), {}, PARSERS.get("hermes"), ChatDeltas(tokenizer), ROLLOUT,
        vision=load_vision(source),
    )  # fmt: skip


def with_engine(source, work, stops=(STOP,)):
    async def run():
        engine = HFSampler(EngineSpec(source, "cpu", "float32", 0, ROLLOUT, list(stops)))
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def watched(function, parts):
    """The function, which notes how many tokens of images each request of a batch has."""

    def watch(model, ids, positions, places, *rest):
        parts.append([len(each) for each in places])
        return function(model, ids, positions, places, *rest)

    return watch


def test_it_samples_from_what_the_trainer_computes(source, monkeypatch):
    """Requests with images beside requests without, in batches so small that prompts are computed in parts, which end
    amid images."""
    env = context(source)
    config = transformers.ContinuousBatchingConfig
    small = {"max_batch_tokens": 23}
    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", lambda **given: config(**{**given, **small}))
    parts = []
    monkeypatch.setattr(vision, "hidden_with_features", watched(vision.hidden_with_features, parts))

    async def play(engine):
        return await asyncio.gather(*(run_episode(prompt, engine, env) for prompt in prompts() * 2))

    played = with_engine(source, play)
    whole = {image.tokens for t in played for image in env.opened(t.prompt)[1]}
    assert any(parts)
    assert any(count not in whole for batch in parts for count in batch)
    for trajectory in played:
        assert trajectory.error is None
        assert trajectory.tokens[: trajectory.prompt_length].tolist() == list(env.prompt_ids(trajectory.prompt))
    batch = pack(played, env.vision)  # as `rl` does
    assert batch.images.counts.tolist() == [len(t.prompt.images) for t in played]
    found = batch.rollout_logprobs[batch.loss_mask]
    torch.testing.assert_close(found, trainer_logprobs(source, batch), rtol=0, atol=2e-5)
    everything = torch.cat([torch.from_numpy(t.tokens[t.loss_mask]) for t in played])
    assert not torch.isin(everything, torch.tensor(env.vision.never_sampled)).any()


class Asks(Interaction):
    """Asks twice more, once with what would be a token of an image."""

    async def create(self, prompt):
        return ["Sure?", "And this <|image_pad|><image>?"]

    async def respond(self, state, messages):
        return UserTurn(state.pop() if state else None)


def test_later_turns_go_on_after_the_images(source):
    stops = range(300)
    cfg = ROLLOUT.model_copy(update={"max_response_tokens": 120, "max_turns": 4})
    env = replace(context(source), cfg=cfg, interaction=Asks(), stop_token_ids=frozenset(stops))

    async def play(engine):
        return await asyncio.gather(*(run_episode(prompt, engine, env) for prompt in prompts() * 2))

    played = with_engine(source, play, stops)
    assert sum(t.turns == 3 for t in played) >= 6
    batch = pack(played, env.vision)
    found = batch.rollout_logprobs[batch.loss_mask]
    torch.testing.assert_close(found, trainer_logprobs(source, batch), rtol=0, atol=2e-5)


class AlwaysZooms(ToolParser):
    """Reads a call in whatever the model writes."""

    def parse(self, text, tools=None):
        return ParsedTurn(text, [ParsedCall("zoom", {"box": [0, 0, 500, 400 + len(text) % 7 * 100]})])

    def render(self, turn):
        return turn.content


def test_images_that_tools_give_are_read_in_later_turns(source):
    """Of prompts with no image, one and several; what cannot be zoomed into is answered in words."""
    stops, tool = range(300), Zoom()
    cfg = ROLLOUT.model_copy(update={"max_response_tokens": 160, "max_turns": 4})
    env = replace(
        context(source), cfg=cfg, tools={"zoom": tool}, parser=AlwaysZooms(), stop_token_ids=frozenset(stops),
        deltas=ChatDeltas(load_tokenizer(source), [tool.schema]),
    )  # fmt: skip
    asked = []

    async def play(engine):
        generate = engine.generate

        async def noted(ids, params, images=()):
            asked.append((ids.tolist(), images))
            return await generate(ids, params, images)

        engine.generate = noted
        return await asyncio.gather(*(run_episode(prompt, engine, env) for prompt in prompts() * 2))

    played = with_engine(source, play, stops)
    assert [t.error for t in played] == [None] * len(played)
    assert sum(len(t.tool_images) >= 2 for t in played) >= 4
    assert any(t.tool_errors == ["error: there is no image"] * 3 for t in played)
    for t in played:  # each request is the beginning of an episode, with the images that stand in it
        mine = [(ids, images) for ids, images in asked if t.tokens.tolist()[: len(ids)] == ids]
        assert len(mine) >= t.turns
        shown = [*t.prompt.images, *t.tool_images]
        assert any([image.raw.entry for image in images] == shown for _, images in mine)
    batch = pack(played, env.vision)
    assert batch.images.counts.tolist() == [len(t.prompt.images) + len(t.tool_images) for t in played]
    assert not (batch.loss_mask & batch.image_tokens).any()
    found = batch.rollout_logprobs[batch.loss_mask]
    torch.testing.assert_close(found, trainer_logprobs(source, batch), rtol=0, atol=2e-5)


def test_the_same_words_about_another_image_are_answered_otherwise(source):
    env = context(source)
    first, other = prompts()[0], prompts()[-1]
    ids, images = env.opened(first)
    same_ids, other_images = env.opened(other)
    assert list(ids) == list(same_ids)
    greedy = SamplingParams(8, temperature=0.0)

    async def ask(engine):
        return [await engine.generate(ids, greedy, seen) for seen in (images, other_images, images)]

    one, two, again = with_engine(source, ask)
    assert one.ids == again.ids
    assert one.ids != two.ids


def test_a_token_of_an_image_is_never_sampled(source):
    env = context(source)

    async def ask(engine):
        weight = engine.model.get_output_embeddings().weight
        with torch.no_grad():
            weight[env.vision.image_id] = weight[5] * 50  # the largest logit, or the smallest
            for other in env.vision.never_sampled[1:]:
                weight[other] = -weight[5] * 50
        return await asyncio.gather(*(engine.generate([1, 2, 3, n], SamplingParams(16)) for n in range(4, 20)))

    sampled = {token for sample in with_engine(source, ask) for token in sample.ids}
    assert len(sampled) > 20
    assert not sampled & set(env.vision.never_sampled)


def test_a_file_that_is_gone_fails_its_request_alone(source, tmp_path):
    env = context(source)
    file = tmp_path / "a.png"
    file.write_bytes(picture(48, 48))
    ids, images = env.opened(replace(prompts()[0], images=[{"path": str(file)}]))
    file.unlink()

    async def ask(engine):
        with pytest.raises(RunError, match="an image of the prompt: no such file"):
            await engine.generate(ids, SamplingParams(4), images)
        return await engine.generate([1, 2, 3], SamplingParams(4))

    assert with_engine(source, ask).ids


def test_a_model_of_text_is_given_no_images():
    vision_env = context(ModelSource("builtin:tiny-vision"))
    ids, images = vision_env.opened(prompts()[0])

    async def ask(engine):
        with pytest.raises(RunError, match="the model reads no images"):
            await engine.generate(ids, SamplingParams(4), images)

    with_engine(ModelSource("builtin:tiny"), ask)
