"""The zoom tool: what it shows of which image, and what it refuses."""

import asyncio

import numpy as np
import pytest

from posttrain.core.types import Prompt
from posttrain.data.images import RawImage
from posttrain.tools.zoom import Zoom
from tests.helpers.seeing import picture, png

QUARTERS = np.zeros((40, 60, 3), np.uint8)
QUARTERS[:20, :30], QUARTERS[:20, 30:], QUARTERS[20:, :30], QUARTERS[20:, 30:] = (
    (250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 250)
)  # fmt: skip


WHOLE = png(QUARTERS)


def zooms(*calls, images=(WHOLE,), **options):
    """The results of calls in one episode."""
    tool = Zoom(**options)

    async def run():
        prompt = Prompt(0, [], "", "", images=[{"bytes": image} for image in images])
        state = await tool.create(prompt)
        return [await tool.call(state, arguments) for arguments in calls]

    return asyncio.run(run())


def pixels(result):
    assert not result.error, result.text
    assert result.text == "<image>"
    (image,) = result.images
    return np.asarray(RawImage(image).decode())


@pytest.mark.parametrize(("scale", "unit"), [(1000, 500 / 30), (2, 1 / 30), (0, 1.0)])
def test_a_box_is_shown_as_large_as_the_image(scale, unit):
    """The upper right quarter, in thousandths, halves and pixels."""
    down = unit * 1.5 if scale else unit
    box = [round(30 * unit), 0, round(60 * unit), round(20 * down)]
    shown = pixels(zooms({"box": box}, scale=scale)[0])
    assert shown.shape == (40, 60, 3)
    assert (shown == (0, 250, 0)).all()


def test_it_is_enlarged_to_the_side_that_is_asked_for_and_keeps_its_proportions():
    shown = pixels(zooms({"box": [0, 0, 30, 10]}, scale=0, side=90)[0])
    assert shown.shape == (30, 90, 3)


def test_other_images_and_what_was_shown_can_be_zoomed_into():
    first, second, third = zooms(
        {"box": [0, 0, 2, 1]},  # red and green
        {"box": [1, 0, 2, 2], "image": 3},  # of that the right half
        {"box": [0, 0, 2, 2], "image": 2},
        images=(WHOLE, picture(32, 32)),
        scale=2,
    )
    assert {tuple(c) for c in pixels(first)[:, :20].reshape(-1, 3)} == {(250, 0, 0)}
    assert (pixels(second) == (0, 250, 0)).all()
    assert (pixels(third) == np.asarray(RawImage(picture(32, 32)).decode())).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1]}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1, "1"]}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1, True]}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1, float("inf")]}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1, 1], "zoom": 2}, "give 'box', a list of four numbers"),
        ({"box": [0, 0, 1, 1], "image": 2}, "'image' is a number from 1 to 1"),
        ({"box": [0, 0, 1, 1], "image": 0}, "'image' is a number from 1 to 1"),
        ({"box": [0, 0, 1, 1], "image": True}, "'image' is a number from 1 to 1"),
        ({"box": [1, 0, 1, 1]}, "the box is empty, or not within the image, which is 3 x 3"),
        ({"box": [0, 0, 4, 1]}, "the box is empty, or not within the image, which is 3 x 3"),
        ({"box": [-1, 0, 1, 1]}, "the box is empty, or not within the image, which is 3 x 3"),
        ({"box": [0.0, 0, 0.001, 1]}, "the box is empty, or not within the image, which is 3 x 3"),
    ],
)
def test_wrong_arguments_are_errors_that_the_model_reads(arguments, message):
    (result,) = zooms(arguments, scale=3)
    assert result.error
    assert result.text.startswith(f"error: {message}")
    assert not result.images


def test_an_episode_is_shown_so_many_and_images_that_cannot_be_read_are_errors():
    box = {"box": [0, 0, 1, 1]}
    assert [result.error for result in zooms(box, box, box, scale=1, most=2)] == [False, False, True]
    assert zooms(box, scale=1, images=())[0].text == "error: there is no image"
    assert zooms(box, scale=1, images=(b"no",))[0].text.startswith("error: not an image that can be read")


def test_calls_of_one_turn_are_shown_and_numbered_in_their_order():
    """The first takes longest; the next are each of another shape."""
    large = png(np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8))

    async def run():
        tool = Zoom(scale=4, most=3)
        state = await tool.create(Prompt(0, [], "", "", images=[{"bytes": large}, {"bytes": WHOLE}]))
        boxes = [(1, [0, 0, 4, 4]), (2, [0, 0, 4, 1]), (2, [0, 0, 1, 4]), (2, [0, 0, 4, 2]), (2, [0, 0, 2, 4])]
        results = await asyncio.gather(*(tool.call(state, {"image": i, "box": box}) for i, box in boxes))
        assert [result.error for result in results] == [False, False, False, True, True]
        return [result.images[0] for result in results[:3]], [image.data for image in state.images[2:]]

    shown, numbered = asyncio.run(run())
    assert shown == numbered


def test_parts_that_processors_refuse_are_not_shown_and_get_no_number():
    wide = png(np.zeros((30, 9000, 3), np.uint8))
    narrow, large, fine, next_one = zooms(
        {"box": [0, 0, 9000, 30]},
        {"box": [0, 0, 30, 30]},
        {"box": [0, 0, 6000, 30]},
        {"box": [0, 0, 6000, 30], "image": 2},
        images=(wide,),
        scale=0,
    )
    assert narrow.text == "error: the box is too narrow: one side may be at most 200 times the other"
    assert large.text == "error: the part would have 9000 x 9000 pixels; at most 67,108,864 are shown"
    assert pixels(fine).shape == (45, 9000, 3)
    assert pixels(next_one).shape[1] == 9000
