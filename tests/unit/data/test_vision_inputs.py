"""What trainers read of conversations with images: ids, positions, pixels, and batches of them."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import Config
from posttrain.core.errors import DataError
from posttrain.data.images import ImageError, PlacedImage, RawImage
from posttrain.data.pack import Images, PackedBatch, costs, place
from posttrain.data.parquet import Conversation, Preference, preference_row, sft_row, write_rows
from posttrain.data.prefetch import Row
from posttrain.data.samples import RenderConversations
from posttrain.data.turns import with_image_parts
from posttrain.data.vision_grids import GridProcessor
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.models.processors import load_vision
from posttrain.preference.command import Pairs
from posttrain.runs.training_run import write_batch
from posttrain.sft.command import Conversations, pack
from posttrain.sft.samples import open_stream
from tests.helpers.seeing import (
    FAMILIES,
    MIXED,
    TILED,
    as_transformers_reads,
    config_of,
    conversation,
    picture,
    rendered,
)

SOURCE = ModelSource("builtin:tiny-vision")
VISION = load_vision(SOURCE)
assert VISION is not None
TOKENIZER = builtin_tokenizer("tiny-vision")
START, END, IMAGE, VIDEO = TOKENIZER.convert_tokens_to_ids(
    ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
)
FIRST = {"file": "f", "index": 0}


def grid_of(tokens):
    return 1, 2, 2 * tokens


def test_an_image_token_stands_as_often_as_its_image_has_features():
    raw = RawImage(b"")
    found = VISION.expand([1, IMAGE, 2, 3, IMAGE, 4], [False, False, False, False, False, True], [
        (raw, grid_of(3)), (raw, grid_of(2)),
    ])  # fmt: skip
    assert found.ids.tolist() == [1, IMAGE, IMAGE, IMAGE, 2, 3, IMAGE, IMAGE, 4]
    assert found.mask.tolist() == [False] * 8 + [True]
    assert [(image.start, image.tokens) for image in found.images] == [(1, 3), (6, 2)]


def test_images_of_a_sequence_that_is_expanded_are_found_again():
    raws = [(RawImage(b"a"), grid_of(3)), (RawImage(b"b"), grid_of(2))]
    found = VISION.expand([1, IMAGE, 2, IMAGE, IMAGE], [False] * 5, [*raws, raws[0]])
    assert VISION.locate(found.ids, [*raws, raws[0]]) == found.images
    assert VISION.locate([1, 2], []) == ()
    for wrong in (raws, raws[::-1], [*raws, raws[1]], [*raws, *raws], []):
        with pytest.raises(ImageError, match=r"8 tokens of images, and not those of its \d images"):
            VISION.locate(found.ids, wrong)


def test_tokens_of_images_never_carry_loss():
    found = VISION.expand([IMAGE, 1], [True, True], [(RawImage(b""), grid_of(4))])
    assert found.mask.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("text", ["no image", "<image><image>", "<image> and <|image_pad|>", "<image><|video_pad|>"])
def test_other_numbers_of_image_tokens_than_images_are_refused(text):
    with pytest.raises(DataError, match=r"f: row 0.*(image tokens|token of a video)"):
        rendered(SOURCE, [conversation(text, picture(32, 32))])


def test_a_bad_image_is_named_by_file_row_and_column():
    rows = [conversation("Hi"), conversation("<image><image>?", picture(32, 32), b"nothing")]
    with pytest.raises(DataError, match=r"f: row 1, column 'images.1': not an image that can be read"):
        rendered(SOURCE, rows)
    with pytest.raises(DataError, match=r"column 'images.0': the model does not read an image of 1 x 900 pixels"):
        rendered(SOURCE, [conversation("<image>?", picture(900, 1))])


def test_a_text_names_its_images_in_parts():
    messages = [{"role": "user", "content": "a<image><image> b"}, {"role": "assistant", "content": "<image>"}]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": " b"}]
    assert with_image_parts(messages, 2) == [{"role": "user", "content": parts}, messages[1]]
    assert with_image_parts(messages, 0) == messages


def test_pixels_are_those_of_transformers():
    images = [image for row in rendered(SOURCE) for image in row.images]
    expected = as_transformers_reads(SOURCE, images)
    batch = pack(rendered(SOURCE), VISION)
    assert torch.equal(batch.images.grids, expected["image_grid_thw"])
    values = VISION.table[np.arange(3)[:, None], batch.images.pixels.numpy().reshape(-1, 3, 64)]
    repeated = np.repeat(values[:, :, None], VISION.frames, axis=2).reshape(len(values), -1)
    assert np.array_equal(repeated, expected["pixel_values"].numpy())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TILED])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_positions_are_those_of_transformers(family, data):
    from transformers import AutoModelForImageTextToText

    if family not in MODELS:
        with torch.device("meta"):
            MODELS[family] = AutoModelForImageTextToText.from_config(config_of(family)).model
    side = st.integers(1, 5)
    layout = data.draw(st.lists(st.tuples(st.integers(1, 4), st.tuples(side, side)), max_size=4))
    kinds, images = [], []
    for text, (height, width) in layout:
        kinds += [0] * text
        images.append(PlacedImage(RawImage(), (1, 2 * height, 2 * width), len(kinds), height * width))
        kinds += [1] * (height * width)
    kinds += [0] * data.draw(st.integers(1, 4))
    expected = torch.arange(len(kinds)).expand(3, -1)
    if images:
        expected = MODELS[family].get_rope_index(
            torch.tensor([kinds]),
            mm_token_type_ids=torch.tensor([kinds]),
            image_grid_thw=torch.tensor([image.grid for image in images]),
        )[0][:, 0]
    assert VISION.positions(len(kinds), images).T.tolist() == expected.tolist()


MODELS = {}


def test_a_conversation_that_is_cut_keeps_its_images_or_is_refused():
    chat = conversation("<image>" + "word " * 20, picture(48, 48), answer="yes")
    (whole,) = rendered(SOURCE, [chat])
    image, length = whole.images[0], len(whole.ids)
    for how in ("left", "right"):
        rows = rendered_cut(chat, length, how)
        assert (rows.ids.tolist(), rows.images) == (whole.ids.tolist(), whole.images)
    cut = rendered_cut(chat, length - image.start, "left")
    assert cut.images == (replace(image, start=0),)
    assert cut.ids[: image.tokens].tolist() == [IMAGE] * image.tokens
    with pytest.raises(DataError, match="would lose an image") as error:
        rendered_cut(chat, length - image.start - 1, "left")
    assert "drop" in error.value.hint
    late = conversation("word " * 20 + "<image>", picture(48, 48), answer="yes")
    with pytest.raises(DataError, match="would lose an image"):
        rendered_cut(late, 30, "right")
    assert rendered_cut(chat, 30, "drop").left_out


def rendered_cut(chat, limit, how):
    return RenderConversations(TOKENIZER, limit, how, vision=VISION).render([chat], [Row("f", 0, {})])[0]


def test_a_batch_selects_its_images_with_its_sequences():
    batch = pack(rendered(SOURCE), VISION)
    assert batch.images.counts.tolist() == [1, 0, 3, 2, 0, 2]
    assert int(batch.image_tokens.sum()) == sum(batch.images.patches) // 4
    assert not (batch.image_tokens & batch.loss_mask).any()
    assert torch.equal(batch.image_tokens, batch.input_ids == IMAGE)
    part = batch.select([3, 1, 0])
    alone = [pack([rendered(SOURCE)[b]], VISION) for b in (3, 1, 0)]
    assert torch.equal(part.images.pixels, torch.cat([a.images.pixels for a in alone if a.images]))
    assert torch.equal(part.images.grids, torch.cat([a.images.grids for a in alone if a.images]))
    assert part.images.counts.tolist() == [2, 0, 1]
    assert torch.equal(part.rotary_ids[: len(alone[0].rotary_ids)], alone[0].rotary_ids)
    assert batch.select([1, 4]).images is None


def test_a_batch_without_images_has_no_columns_for_them():
    batch = pack([row for row in rendered(SOURCE) if not row.images], VISION)
    assert (batch.images, batch.image_tokens, batch.rotary_ids) == (None, None, None)


def test_every_worker_has_an_image_where_any_has_one():
    batch = pack(rendered(SOURCE), VISION)
    plain = batch.select([1, 4, 1, 4])
    shards = place(plain.lengths, ranks=2, token_budget=40).shards(plain)
    assert all(micro.images is None for rank in shards for micro in rank)
    placement = place(batch.lengths, ranks=2, token_budget=60)
    placement = replace(placement, parts=[[[0], [1]], [[4], [2, 3]]])
    (a, b), (c, d) = placement.shards(batch)
    assert [len(micro.images.patches) for micro in (a, b, c, d)] == [1, 1, 1, 5]
    for blank in (b, c):
        assert blank.images.patches == [4]
        assert not blank.image_tokens.any()
        assert blank.images.counts.tolist() == [0]
    # What is summed over workers once a step is summed in the last micro-batch.
    placement = replace(placement, parts=[[[0], [1]], [[2, 3], [4]]])
    assert all(rank[-1].images.patches == [4] for rank in placement.shards(batch))
    empty = replace(placement, parts=[[[0, 1, 2, 3, 4]], [[]]]).shards(batch)[1][0]
    assert (empty.num_tokens, empty.images.patches, empty.rotary_ids.shape) == (2, [4], (2, 3))


def test_micro_batches_keep_within_the_patch_budget():
    batch = pack(rendered(SOURCE), VISION)
    patches = batch.images.patches_of_sequences()
    of = batch.images.patches
    assert patches == [36, 0, sum(of[1:4]), sum(of[4:6]), 0, sum(of[6:])]
    assert costs(batch, 1000, None) == batch.lengths
    parts = place(costs(batch, 1000, max(patches)), ranks=1, token_budget=1000).parts[0]
    assert all(sum(patches[b] for b in part) <= max(patches) for part in parts)
    assert len(parts) < batch.num_sequences


def test_a_processor_can_go_to_other_processes():
    again = pickle.loads(pickle.dumps(VISION))
    assert again.expand([IMAGE], [False], [(RawImage(), (1, 2, 2))]).ids.tolist() == [IMAGE]
    assert np.array_equal(again.table, VISION.table)


def test_both_answers_of_a_pair_have_its_images(tmp_path):
    pairs = [Preference(chat.messages[:1], answer("yes"), answer("no, no"), images=chat.images) for chat in ONE_TURN]
    write_rows(tmp_path / "p.parquet", map(preference_row, pairs))
    objective = Pairs()
    objective.vision = VISION
    cfg = Config.model_validate(
        {"command": "prefer", "data": {"train": str(tmp_path), "batch_size": 4, "shuffle": False}}
    )
    with open_stream(objective, cfg, TOKENIZER) as stream:
        batch = objective.pack(stream.next().samples)
    chosen, rejected = (
        [Conversation([*p.prompt, *getattr(p, side)], images=p.images) for p in pairs] for side in SIDES
    )
    expected = pack(rendered(SOURCE, [*chosen, *rejected]), VISION)
    for column in ("input_ids", "loss_mask", "image_tokens", "rotary_ids"):
        assert torch.equal(getattr(batch, column), getattr(expected, column))
    assert torch.equal(batch.images.pixels, expected.images.pixels)
    assert batch.images.counts.tolist() == [1, 0, 3, 0] * 2


SIDES = ("chosen", "rejected")
ONE_TURN = [chat for chat in MIXED if len(chat.messages) == 2]


def answer(text):
    return [{"role": "assistant", "content": text}]


def test_a_file_that_changes_during_the_run_is_an_error(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(picture(48, 48))
    chat = conversation("<image>?", b"")
    chat.images[0] = {"path": str(file)}
    rows = rendered(SOURCE, [chat])
    assert pack(rows, VISION).images.patches == [36]
    file.write_bytes(picture(64, 48))
    with pytest.raises(DataError, match="its grid is"):
        pack(rows, VISION)
    file.unlink()
    with pytest.raises(DataError, match="no such file"):
        pack(rows, VISION)


def test_real_figures_become_as_many_tokens_as_transformers_says(test_data):
    """Of geometry3k, with the settings of Qwen2.5-VL and of Qwen3-VL."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    figures = sorted((test_data / "geometry3k").rglob("*.png"))
    assert len(figures) >= 10
    for patch, smallest, largest in ((14, 56 * 56, 28 * 28 * 1280), (16, 65_536, 16_777_216)):
        size = {"shortest_edge": smallest, "longest_edge": largest}
        processor = Qwen2VLImageProcessorPil(size=size, patch_size=patch)
        vision = GridProcessor(processor, image_id=IMAGE, video_id=VIDEO)
        for file in figures:
            raw = RawImage(path=str(file))
            image, grid = raw.decode(), vision.grid(raw)
            patches = processor.get_number_of_image_patches(image.height, image.width)
            assert grid[0] * grid[1] * grid[2] == patches
            found = vision.expand([1, IMAGE, 2], [False] * 3, [(raw, grid)])
            assert found.images[0].tokens == patches // 4 == len(found.ids) - 2
            assert vision.pixels(found.images).shape == (patches, 3 * patch**2)


@pytest.mark.slow
def test_processes_read_images_as_the_driver_does(tmp_path):
    write_rows(tmp_path / "c.parquet", [sft_row(MIXED[n % len(MIXED)]) for n in range(40)])
    objective = Conversations()
    objective.vision = VISION
    seen = []
    for above in (0, 100):
        sections = {"train": str(tmp_path), "batch_size": 8, "stream_above": above, "workers": 1}
        cfg = Config.model_validate({"command": "sft", "data": sections})
        with open_stream(objective, cfg, TOKENIZER) as stream:
            batches = [objective.pack(stream.next().samples) for _ in range(6)]
        seen.append([(b.input_ids.tolist(), b.rotary_ids.tolist(), b.images.pixels.tolist()) for b in batches])
    assert seen[0] == seen[1]


def test_a_batch_with_images_is_kept_whole(tmp_path):
    batch = pack(rendered(SOURCE), VISION)
    write_batch(tmp_path / "batch.pt", batch)
    found = torch.load(tmp_path / "batch.pt", weights_only=True)
    again = PackedBatch(**{**found, "images": Images(**found["images"])})
    assert torch.equal(again.images.pixels, batch.images.pixels)
    assert torch.equal(again.rotary_ids, batch.rotary_ids)


def test_many_images_leave_no_memory_behind():
    import resource

    raw = RawImage(picture(256, 256))
    for _ in range(20):
        VISION.grid(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        VISION.grid(raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # of 39,000 KiB decoded


def test_the_mixed_rows_have_what_the_tests_say():
    assert [len(chat.images) for chat in MIXED] == [1, 0, 3, 2, 0, 2]
    assert isinstance(pack(rendered(SOURCE), VISION), PackedBatch)
    assert VISION.video_id == VIDEO
    assert START != END
    with pytest.raises(ImageError, match="video"):
        VISION.expand([VIDEO], [False], [])
