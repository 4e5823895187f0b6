"""Images in tiles (SmolVLM, Idefics3): ids, tiles and pixels are those of transformers' own processors."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)

from posttrain.core.errors import DataError, ModelError
from posttrain.data.chat import ChatDeltas, render_chat, render_prompt
from posttrain.data.images import RawImage
from posttrain.data.turns import with_image_parts
from posttrain.data.vision_tiles import TileProcessor
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.models.processors import load_vision
from posttrain.sft.command import pack
from tests.helpers.seeing import (
    MIXED,
    SMOLVLM_TEMPLATE,
    TILED,
    as_transformers_reads,
    conversation,
    picture,
    rendered,
    save_text_side,
    text_source,
)


@pytest.fixture(scope="module", params=TILED)
def source(request, tmp_path_factory):
    return text_source(request.param, tmp_path_factory.mktemp(request.param))


class SizesAlone(SmolVLMImageProcessorPil):
    """Goes through all steps of the processor on images without pixels."""

    def resize(self, image, size, resample=None, **how):
        longest = size.longest_edge
        sides = get_resize_output_image_size(image, longest) if longest else (size.height, size.width)
        return np.broadcast_to(np.uint8(0), (3, *sides))


SIDES = st.one_of(st.integers(1, 60), st.integers(1, 5000))


@settings(max_examples=300, deadline=None)
@given(height=SIDES, width=SIDES, tile=st.sampled_from([8, 36, 512]), times=st.sampled_from([0.5, 1, 3.5, 4, 9]))
def test_an_image_is_cut_into_as_many_tiles_as_the_processor_makes(height, width, tile, times):
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    for splits, resizes in ((True, True), (True, False), (False, True)):
        processor = SizesAlone(
            size={"longest_edge": int(tile * times)}, max_image_size={"longest_edge": tile}, do_image_splitting=splits,
            do_resize=resizes,
        )  # fmt: skip
        made = processor.preprocess(
            [[image]], do_rescale=False, do_normalize=False, do_pad=False, return_row_col_info=True,
            input_data_format="channels_first",
        )  # fmt: skip
        reader = TileProcessor(processor, None, image_id=1, video_id=None, patch_size=4, merge=1)
        assert reader.tiling.divided(height, width) == (made["rows"][0][0], made["cols"][0][0])


def test_tokens_are_those_of_the_processor(source):
    """The library expands texts, and has the text of the whole tokenized."""
    reader, tokenizer = load_vision(source), load_tokenizer(source)
    settings = {"size": reader.processor.size, "max_image_size": reader.processor.max_image_size}
    theirs = Idefics3Processor(type(reader.processor)(**settings), tokenizer, image_seq_len=4)
    assert len(rendered(source)) == len(MIXED)
    for row, chat in zip(rendered(source), MIXED, strict=True):
        parts = with_image_parts(chat.messages, len(chat.images))
        text = tokenizer.apply_chat_template(parts, tools=chat.tools or None, tokenize=False)
        images = [RawImage.of(image).decode() for image in chat.images]
        expected = theirs(text=text, images=images or None, add_special_tokens=False)["input_ids"][0]
        assert row.ids.tolist() == expected
        assert not row.mask[row.ids == reader.image_id].any()
        assert reader.one_token_each(row.ids, row.images) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reader.locate(row.ids, [(image.raw, image.grid) for image in row.images]) == row.images


def test_pixels_are_those_of_the_processor(source):
    reader = load_vision(source)
    rows = [row for row in rendered(source) if row.images]
    for row in rows:
        batch = pack([row], reader)
        tiles = as_transformers_reads(source, row.images)["pixel_values"][0].numpy()
        assert [tuple(grid) for grid in batch.images.grids.tolist()] == [(i.grid[0], 4, 4) for i in row.images]
        cut = batch.images.pixels.numpy().reshape(-1, 4, 4, 3, 8, 8).transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 32, 32)
        read = reader.table[np.arange(3)[:, None, None], cut]
        assert np.array_equal(read, tiles[:, :, :32, :32])  # the tower reads no part of a patch
        assert int(batch.image_tokens.sum()) == len(tiles) * 4
        assert batch.rotary_ids is None
    assert pack(rows, reader).images.blank(1).patches == [16]


def test_a_conversation_that_is_cut_loses_no_part_of_a_block(source):
    reader = load_vision(source)
    (row,) = rendered(source, [conversation("<image>How many?", picture(40, 70))])
    (image,) = row.images
    assert image.tokens > len(reader.block((1, 0, 0))) > 4
    wrong = row.ids.copy()
    wrong[image.start + image.tokens - 1] = 5
    for ids in (row.ids[: image.start + 7], wrong):
        with pytest.raises(Exception, match="not those of its 1 images"):
            reader.locate(ids, [(image.raw, image.grid)])


def test_texts_with_the_image_token_are_refused(source):
    for chat in (conversation("An <image>?"), conversation("<image><image>", picture(32, 32))):
        with pytest.raises(DataError, match="image tokens, and the row"):
            rendered(source, [chat])


def test_a_processor_can_go_to_other_processes(source):
    reader = load_vision(source)
    again = pickle.loads(pickle.dumps(reader))
    assert again.block((3, 1, 2)).tolist() == reader.block((3, 1, 2)).tolist()
    assert np.array_equal(again.table, reader.table)


def test_settings_of_another_model_are_refused(source, tmp_path):
    save_text_side(load_family(source), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"max_image_size": {"longest_edge": 24}}')
    with pytest.raises(ModelError, match="tiles with max_image_size = 24, and the config makes it 36"):
        load_vision(ModelSource(str(tmp_path)))


def load_family(source):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.path).model_type


def test_a_template_that_shows_texts_in_parts_alone_is_given_parts(source):
    """SmolVLM's own."""
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = SMOLVLM_TEMPLATE
    asked = [{"role": "user", "content": "Hello 7"}]
    said = [*asked, {"role": "assistant", "content": "It is 5."}]
    assert tokenizer.decode(render_prompt(asked, tokenizer)) == "<|im_start|>User: Hello 7<|im_end|>\nAssistant:"
    seen = with_image_parts([{"role": "user", "content": "<image>Hello"}, said[1]], 1)
    chat = render_chat(seen, tokenizer)
    assert tokenizer.decode(chat.ids) == "<|im_start|>User:<image>Hello<|im_end|>\nAssistant: It is 5.<|im_end|>\n"
    sampled = [i for i, taken in zip(chat.ids, chat.mask, strict=True) if taken]
    assert tokenizer.decode(sampled) == " It is 5.<|im_end|>"
    deltas = ChatDeltas(tokenizer)
    for text in ("And now?", "Sure?"):
        assert deltas.text([{"role": "user", "content": text}]) == f"\nUser: {text}<|im_end|>\nAssistant:"
    assert torch.tensor(chat.ids).ndim == 1
