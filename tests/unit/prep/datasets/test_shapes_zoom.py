"""Pictures whose detail a model sees by looking closer: only there, and where the demonstrations say."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from posttrain.config.presets import resolve
from posttrain.core.errors import DataError
from posttrain.core.types import Prompt
from posttrain.data.images import PlacedImage, RawImage
from posttrain.models.load import locate
from posttrain.models.processors import load_vision
from posttrain.prep.datasets.base import open_dataset, refusal
from posttrain.prep.datasets.shapes_zoom import FIELDS, QUARTER, TOOL, ShapesZoom, one_square
from posttrain.tools.zoom import Zoom


def rows(split="train", n=60, seed=0):
    return list(ShapesZoom().rows(split, None, n=n, seed=seed))


def as_read(data):
    """The pixels of an image as the built-in model reads them."""
    vision = load_vision(locate("builtin:tiny-vision"))
    raw = RawImage(data)
    return vision.pixels([PlacedImage(raw, vision.grid(raw), 0, 1)]).astype(int)


def test_the_model_sees_a_pattern_in_its_quarter_and_nowhere_else():
    for seed in range(5):
        scene = one_square(random.Random(seed))
        grey, _, row, column = scene.things[0]
        pictures = [replace(scene, things=((grey, pattern, row, column),)).draw() for pattern in range(3)]
        top, left = divmod(scene.quarter, 2)
        quarters = [TOOL.zoom(RawImage(data), [left, top, left + 1, top + 1]) for data in pictures]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert np.abs(as_read(pictures[one]) - as_read(pictures[other])).max() <= 1  # rounding
            assert np.abs(as_read(quarters[one]) - as_read(quarters[other])).max() > 100


def test_every_row_is_good_and_the_splits_share_no_picture():
    dataset = open_dataset("shapes-zoom")
    for index, row in enumerate(rows("test")):
        assert refusal(dataset, row) is None
        prompt, conversation = dataset.to_rlhf(row, index, "test"), dataset.to_sft(row, index, "test")
        assert prompt["prompt"] == conversation.messages[:1]
        assert prompt["images"] == conversation.images[:1] == row["images"]
        assert conversation.messages[-1]["content"] == f"#### {prompt['reward_model']['ground_truth']}"
        assert len(conversation.images) == 2
    train, test = ({row["images"][0]["bytes"] for row in rows(split, n=300)} for split in ("train", "test"))
    assert not train & test


def test_half_of_the_training_conversations_do_not_look_where_the_square_is():
    dataset, found = ShapesZoom(), Counter()
    for row in rows(n=400):
        messages = dataset.to_sft(row, 0, "train").messages
        if len(messages) == 2:
            found["unseen"] += 1
            continue
        left, top, *_ = messages[1]["tool_calls"][0]["function"]["arguments"]["box"]
        found["right" if 2 * top + left == row["quarter"] else "elsewhere"] += 1
    assert 0.43 < found["right"] / 400 < 0.57
    assert 0.18 < found["elsewhere"] / 400 < 0.32


def test_the_tool_of_the_presets_shows_what_the_demonstrations_show():
    for command, preset in (("rl", "tiny-vision-zoom"), ("generate", "tiny-vision-zoom-generate")):
        table = resolve(command, preset).config.tools["quarters"]
        tool = Zoom(**{key: value for key, value in dict(table).items() if key != "type"})
        assert (tool.scale, tool.side) == (TOOL.scale, TOOL.side)
    row = next(row for row in rows() if len(ShapesZoom().to_sft(row, 0, "test").images) == 2)
    conversation = ShapesZoom().to_sft(row, 0, "test")

    async def shown():
        state = await tool.create(Prompt(0, [], "", "", images=row["images"]))
        return await tool.call(state, conversation.messages[1]["tool_calls"][0]["function"]["arguments"])

    result = asyncio.run(shown())
    assert result.images == (conversation.images[1]["bytes"],)
    image = np.asarray(RawImage(result.images[0]).decode())
    assert image.shape == (QUARTER, QUARTER, 3)
    assert (image == FIELDS[row["quarter"]]).all(-1).sum() == QUARTER**2 - 48**2


def test_more_rows_than_there_are_scenes_are_refused():
    with pytest.raises(DataError, match="shapes-zoom: 5000 train rows asked for, and it has 4500"):
        next(ShapesZoom().rows("train", None, n=5000))
