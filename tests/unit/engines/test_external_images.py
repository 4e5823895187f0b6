"""What SGLang and vLLM are given of prompts with images: what trainers read."""

import asyncio

import numpy as np
import pytest
import torch
from PIL import Image

from posttrain.core.errors import RunError
from posttrain.data.images import PlacedImage, RawImage
from posttrain.engines.external_images import EngineImages
from posttrain.models.load import ModelSource
from posttrain.models.processors import load_vision
from tests.helpers.seeing import (
    FAMILIES,
    TILED,
    as_transformers_reads,
    config_of,
    picture,
    rendered,
    save_text_side,
    text_source,
)

GRIDS = [family for family in FAMILIES if family not in TILED]


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    return text_source(request.param, tmp_path_factory.mktemp(request.param))


def images_of(source):
    return EngineImages(load_vision(source), "vLLM")


def test_an_engine_that_expands_is_given_one_token_for_each_image_at_the_size_that_is_read(source):
    given = images_of(source)
    for row in rendered(source):
        if type(given.reader).__name__ == "TileProcessor" and row.images:
            with pytest.raises(RunError, match="the model reads an image in several pictures"):
                asyncio.run(given.prompt(row.ids, row.images))
            continue
        ids, pictures = asyncio.run(given.prompt(row.ids, row.images))
        assert ids.count(given.reader.image_id) == len(pictures) == len(row.images)
        assert given.reader.expand(ids, [False] * len(ids), [(i.raw, i.grid) for i in row.images]).ids.tolist() == (
            row.ids.tolist()
        )
        given.check(row.ids, row.ids.tolist())
        if not pictures:
            continue
        # Whoever resizes them again, and cuts them, has what trainers have.
        again = given.reader.processor(pictures, return_tensors="pt", do_rescale=False, do_normalize=False)
        assert [tuple(grid) for grid in again["image_grid_thw"].tolist()] == [image.grid for image in row.images]
        values = again["pixel_values"].numpy().reshape(-1, 3, given.reader.frames, 64)
        assert np.array_equal(values[:, :, 0].reshape(len(values), -1), given.reader.pixels(row.images))
        for image, shown in zip(row.images, pictures, strict=True):
            assert (shown.height, shown.width) == (image.grid[1] * 8, image.grid[2] * 8)
            original = image.raw.decode().resize(shown.size, Image.Resampling.BICUBIC)
            assert np.array_equal(np.asarray(original), np.asarray(shown))


def test_an_engine_that_expands_otherwise_is_found_out(source):
    with pytest.raises(RunError, match="vLLM makes 2 tokens of a prompt with images, and trainers read 3"):
        images_of(source).check(np.array([1, 2, 3]), [1, 2])


def test_tokens_of_images_are_made_unlikely(source):
    given = images_of(source)
    assert given.bias == dict.fromkeys(given.reader.never_sampled, -100.0)
    assert EngineImages(None, "SGLang").bias == {}


@pytest.mark.parametrize("family", GRIDS)
def test_sglang_is_given_patches_grids_and_positions_as_trainers_read_them(family, tmp_path):
    from transformers import AutoModelForImageTextToText

    save_text_side(family, tmp_path)
    source = ModelSource(str(tmp_path))
    given = images_of(source)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config_of(family)).model
    for row in rendered(source):
        found = asyncio.run(given.processed(row.ids, row.images))
        if not row.images:
            assert found is None
            continue
        expected = as_transformers_reads(source, row.images)
        assert torch.equal(found["pixel_values"], expected["pixel_values"])
        assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
        ids = torch.from_numpy(row.ids).long()[None]
        positions, delta = model.get_rope_index(
            ids, mm_token_type_ids=(ids == given.reader.image_id).int(), image_grid_thw=found["image_grid_thw"]
        )
        assert torch.equal(found["mrope_positions"], positions[:, 0])
        assert found["mrope_position_delta"].tolist() == delta.tolist()
        for (first, last), image in zip(found["offsets"], row.images, strict=True):
            assert (row.ids[first : last + 1] == given.reader.image_id).all()
            assert (first, last - first + 1) == (image.start, image.tokens)


def test_images_that_cannot_be_read_any_more_fail_their_request(source, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(picture(48, 48))
    given = images_of(source)
    raw = RawImage(path=str(file))
    grid = given.reader.grid(raw)
    image = PlacedImage(raw, grid, 0, len(given.reader.block(grid)))
    file.unlink()
    with pytest.raises(RunError, match="an image of the prompt: no such file"):
        asyncio.run(given.processed(given.reader.block(grid), [image]))


def test_a_model_of_text_is_given_no_images():
    given = EngineImages(None, "SGLang")
    image = PlacedImage(RawImage(b""), (1, 2, 2), 0, 1)
    assert asyncio.run(given.prompt(np.array([1, 2]), ())) == ([1, 2], [])
    for work in (given.prompt([1], [image]), given.processed([1], [image])):
        with pytest.raises(RunError, match="SGLang is given ids alone"):
            asyncio.run(work)
