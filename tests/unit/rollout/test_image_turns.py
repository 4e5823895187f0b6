"""Tools that give images: engines and trainers read the same tokens and the same images, over any number of turns."""

import asyncio
import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config import RolloutConfig
from posttrain.core.types import Prompt, Sample
from posttrain.data.chat import ChatDeltas
from posttrain.data.images import RawImage
from posttrain.data.turns import IMAGE, with_image_parts
from posttrain.data.vision_grids import GridProcessor
from posttrain.generation.output import further_columns, response_table
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.models.processors import load_vision
from posttrain.rl.batch import pack
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.episode import Episode
from posttrain.tools.base import Tool, ToolResult
from posttrain.tools.formats import PARSERS
from tests.helpers.scripted import run_episode
from tests.helpers.seeing import TILED, picture, save_text_side, tokenizer_of

TEMPLATES = ("tiny", "qwen2_5_vl", "qwen3_vl", "smolvlm")
SIZES = ((32, 32), (48, 48), (33, 90), (64, 40))
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "images": {"type": "array"}}},
    },
}


class Look(Tool):
    """Says what it is told to say, and shows pictures of these sizes."""

    name, schema, gives_images = "look", SCHEMA, True

    async def call(self, state, arguments):
        pictures = [picture(*SIZES[size], seed) for seed, size in enumerate(arguments["images"])]
        return ToolResult(arguments["text"], images=tuple(pictures))


class Writer:
    """Samples the tokens of a script, cut into words at places of its own: mostly not as a tokenizer would."""

    def __init__(self, tokenizer, texts, cuts=()):
        self.tokenizer, self.texts, self.cuts = tokenizer, list(texts), cuts
        self.asked, self.samples = [], []

    async def generate(self, prompt_ids, params, images=()):
        self.asked.append((prompt_ids.tolist(), tuple(images)))
        text = self.texts.pop(0)
        # Tokens of images are never sampled.
        inside = {found.start() + 2 for found in re.finditer(r"<(\||image|fake|row)", text)}
        places = sorted({min(c, len(text)) for c in self.cuts} | inside | {0, len(text)})
        pieces = [text[a:b] for a, b in itertools.pairwise(places)]
        ids = [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        self.samples.append([*ids, self.tokenizer.eos_token_id][: params.max_new_tokens])
        return Sample(self.samples[-1], [-0.5] * len(self.samples[-1]), "stop", 3)


def call(text, images=()):
    body = json.dumps({"name": "look", "arguments": {"text": text, "images": list(images)}})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """What reads images in tiles."""
    folder = tmp_path_factory.mktemp("smolvlm")
    save_text_side("smolvlm", folder)
    return load_vision(ModelSource(str(folder)))


def context(tokenizer, reader=None, **cfg):
    if reader is None:
        numbers = {name: tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
        grids = load_vision(ModelSource("builtin:tiny-vision"))
        reader = GridProcessor(grids.processor, image_id=numbers["image"], video_id=numbers["video"])
    return EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset({tokenizer.eos_token_id}),
        tools={"look": Look()},
        parser=PARSERS.get("hermes"),
        deltas=ChatDeltas(tokenizer, [SCHEMA]),
        cfg=RolloutConfig(**{"max_turns": 20, "max_response_tokens": 100_000} | cfg),
        vision=reader,
    )


SPECIAL = ("<|image_pad|>", "<|vision_start|>", "<fake_token_around_image>", "<row_1_col_1>")
WORDS = st.sampled_from(["\n", "7", "é", "The", "<tool_response>", "{", "'", "🙂", *SPECIAL])
TEXTS = st.lists(WORDS, max_size=4).map("".join)


@st.composite
def results(draw):
    """A call: what the tool says, with a mark for each of its pictures; without one, what looks like a mark."""
    sizes = draw(st.lists(st.integers(0, len(SIZES) - 1), max_size=3))
    if not sizes:
        return call(draw(TEXTS) + draw(st.sampled_from(["", IMAGE])) + "end")
    return call("a" + "".join(draw(TEXTS) + IMAGE for _ in sizes) + draw(TEXTS) + "b", sizes)


@st.composite
def conversations(draw):
    turns = [
        "\n".join(["Let me look.", *draw(st.lists(results(), min_size=1, max_size=3))])
        for _ in range(draw(st.integers(1, 4)))
    ]
    asked = draw(st.lists(st.integers(0, len(SIZES) - 1), max_size=2))
    return asked, [*turns, "It is 5."], draw(st.lists(st.integers(1, 60), max_size=6))


@pytest.fixture
def tokenizers(qwen):
    own = {name: tokenizer_of(name) for name in ("tiny", *TILED)}
    return lambda template: own.get(template) or qwen(template)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations())
def test_tokens_and_images_are_those_of_the_prompt_and_then_those_of_each_answer(
    tokenizers, tiles, template, conversation
):  # fmt: skip
    asked, turns, cuts = conversation
    tokenizer = tokenizers(template)
    env = context(tokenizer, tiles if template in TILED else None)
    images = [{"bytes": picture(*SIZES[size], 9)} for size in asked]
    prompt = Prompt(0, [{"role": "user", "content": IMAGE * len(images) + "Look at it."}], "", "", images=images)
    writer = Writer(tokenizer, turns, cuts)
    episode = asyncio.run(run_episode(prompt, writer, env))
    assert (episode.error, episode.stop_reason, writer.texts, episode.tool_errors) == (None, "stop", [], [])

    # Each request goes on from the one before, and so do its images.
    for (ids, seen), (later, more), sample in zip(writer.asked, writer.asked[1:], writer.samples, strict=False):
        assert later[: len(ids) + len(sample)] == ids + sample
        assert more[: len(seen)] == seen
    ids, seen = writer.asked[-1]
    assert episode.tokens.tolist() == ids + writer.samples[-1]
    assert [image.raw.entry for image in seen] == images + episode.tool_images

    # The trainer finds the same images at the same places, and no loss on them.
    batch = pack([episode], env.vision)
    shown = (episode.tokens == env.vision.image_id).tolist()
    assert sum(shown) == sum((env.vision.block(image.grid) == env.vision.image_id).sum() for image in seen)
    assert not (episode.loss_mask & shown).any()
    if seen:
        assert batch.image_tokens.tolist() == shown
        assert batch.images.grids.tolist() == [list(env.vision.patch_grid(image.grid)) for image in seen]
        sized = [(image.raw, env.vision.grid(image.raw)) for image in seen]
        assert env.vision.locate(episode.tokens, sized) == seen

    # With one token for each image it is the template's text of the whole conversation, which is a row of its own.
    single = env.vision.one_token_each(episode.tokens, seen)
    whole = tokenizer.apply_chat_template(
        with_image_parts(episode.messages, len(seen)), tools=[SCHEMA], tokenize=False
    )  # fmt: skip
    assert whole == tokenizer.decode(single) + "\n"
    assert sum(m["content"].count(IMAGE) for m in episode.messages if m["role"] != "assistant") == len(seen)


# ---------------------------------------------------------------------- single cases

TINY = builtin_tokenizer("tiny-vision")


def play(*turns, images=(), **cfg):
    prompt = Prompt(0, [{"role": "user", "content": IMAGE * len(images) + "Look."}], "", "", images=list(images))
    env = context(TINY, **cfg)
    writer = Writer(TINY, turns)
    return asyncio.run(run_episode(prompt, writer, env)), env, writer


def test_what_a_tool_gives_wrongly_is_answered_with_why():
    for text, images, message in (
        ("no mark", [0], "error: look failed: its text names 0 images, and it gave 1"),
        (IMAGE * 3, [0, 0], "error: look failed: its text names 3 images, and it gave 2"),
    ):
        episode, _, _ = play(call(text, images), "5")
        assert episode.messages[-2]["content"] == message
        assert episode.tool_errors == [message]
        assert episode.tool_images == []


def test_a_result_whose_mark_is_cut_off_is_an_error_and_no_other_image():
    episode, _, _ = play(call("x" * 90 + IMAGE + "x" * 90, [0]), "5", max_tool_response_chars=40)
    assert episode.tool_errors == ["error: look failed: its text names 0 images, and it gave 1"]


def test_damaged_images_are_errors_that_the_model_reads(monkeypatch):
    async def broken(self, state, arguments):
        return ToolResult(IMAGE, images=(b"no image",))

    monkeypatch.setattr(Look, "call", broken)
    episode, _, _ = play(call(""), "5")
    assert episode.error is None
    assert episode.messages[-2]["content"].startswith("error: look failed: not an image that can be read")


def test_a_model_of_text_is_told_that_it_reads_no_images():
    env = replace(context(TINY), vision=None)
    prompt = Prompt(0, [{"role": "user", "content": "Look."}], "", "")
    episode = asyncio.run(run_episode(prompt, Writer(TINY, [call(IMAGE, [0]), "5"]), env))
    assert episode.tool_errors == ["error: look failed: it gave an image, and the model reads text alone"]


def test_an_image_that_does_not_fit_is_not_read():
    first, _, _ = play(call(IMAGE, [1]), "5")
    before = first.response_length - 2  # all but the last turn
    episode, env, writer = play(call(IMAGE, [1]), "5", max_response_tokens=before)
    assert episode.stop_reason == "length"
    assert len(writer.asked) == 1
    assert episode.tool_images == []
    assert not (episode.tokens == env.vision.image_id).any()
    assert pack([episode], env.vision).images is None


def test_responses_are_written_with_the_images_that_tools_gave():
    episode, env, _ = play(call("See " + IMAGE, [2]), call(IMAGE * 2, [0, 3]), "It is 5.")
    found = response_table([(0, [episode])], further_columns(env))
    assert found["tool_images"].to_pylist() == [[[{**image, "path": None} for image in episode.tool_images]]]
    assert len(episode.tool_images) == found["conversations"].to_pylist()[0][0].count(IMAGE) - 3  # of the calls
    assert further_columns(replace(env, vision=None)) == ()


def test_an_episode_goes_on_with_the_images_that_it_had():
    """As after a pause, from its rollout file."""
    images = [{"bytes": picture(48, 48)}]
    turns = [call("See " + IMAGE, [2]), call(IMAGE + IMAGE, [0, 3]), "It is 5."]
    prompt = Prompt(0, [{"role": "user", "content": IMAGE + "Look."}], "", "", images=images)
    env = context(TINY)

    async def interrupted():
        writer = Writer(TINY, turns)
        episode = Episode(prompt, env)
        generate, held = writer.generate, asyncio.Event()

        async def hold(prompt_ids, params, images=()):
            if len(writer.asked) == 2:
                held.set()
                await asyncio.sleep(3600)
            return await generate(prompt_ids, params, images)

        writer.generate = hold
        playing = asyncio.create_task(episode.play(writer))
        await asyncio.wait_for(held.wait(), 60)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        other = Episode(prompt, env)
        other.go_on(episode.so_far())
        rest = Writer(TINY, turns[2:])
        return await other.play(rest), rest.asked

    whole, _, writer = play(*turns, images=images)
    episode, asked = asyncio.run(interrupted())
    assert asked == writer.asked[2:]
    assert episode.tokens.tolist() == whole.tokens.tolist()
    assert episode.tool_images == whole.tool_images
    assert [RawImage.of(image) for image in episode.tool_images] == [image.raw for image in asked[0][1][1:]]
