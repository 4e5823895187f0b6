"""Generated pictures and questions about them."""

import numpy as np
import pytest

from posttrain.core.errors import DataError
from posttrain.data.images import RawImage
from posttrain.prep.datasets.base import open_dataset, refusal
from posttrain.prep.datasets.shapes import COLOURS, Shapes
from posttrain.prep.measure import question


def rows(split="train", n=30, seed=0):
    return list(Shapes().rows(split, None, n=n, seed=seed))


def test_rows_are_the_same_for_the_same_seed_and_differ_for_another():
    assert rows() == rows()
    assert rows() != rows(seed=1)
    assert rows()[:10] == rows(n=10)


def test_train_and_test_share_no_picture():
    train, test = ({row["images"][0]["bytes"] for row in rows(split, n=300)} for split in ("train", "test"))
    assert len(train) > 290  # the same picture may be asked about twice
    assert not train & test


def test_some_training_conversations_are_off_by_one_and_no_other():
    dataset = open_dataset("shapes")
    found = [int(dataset.to_sft(row, 0, "train").messages[-1]["content"][5:]) for row in rows(n=400)]
    gold = [int(dataset.gold(row)) for row in rows(n=400)]
    assert 0.3 < sum(a != b for a, b in zip(found, gold, strict=True)) / 400 < 0.4
    assert all(a in (b, b - 1) or (a, b) == (1, 0) for a, b in zip(found, gold, strict=True))


def test_every_row_is_good():
    dataset = open_dataset("shapes")
    for index, row in enumerate(rows("test")):
        assert refusal(dataset, row) is None
        prompt, conversation = dataset.to_rlhf(row, index, "test"), dataset.to_sft(row, index, "test")
        assert prompt["images"] == conversation.images == row["images"]
        assert conversation.messages[-1]["content"] == f"#### {prompt['reward_model']['ground_truth']}"
        assert prompt["prompt"] == conversation.messages[:-1]
        assert RawImage.of(row["images"][0]).decode().size == (48, 48)


def test_the_answer_is_in_the_picture():
    """The larger square has more pixels, and what is counted has that many middles of its shape."""
    for row in rows(n=60):
        pixels = np.asarray(RawImage.of(row["images"][0]).decode()).astype(int)
        words, answer = row["question"].replace("?", "").split(), row["answer"].removeprefix("#### ")
        if "more," in words:
            first, second = (int((pixels == COLOURS[c]).all(-1).sum()) for c in (words[6], words[-1]))
            assert answer == ("1" if first > second else "2")
        elif words[0].endswith("How"):
            corners = middles = 0
            for y in range(8, 48, 16):
                for x in range(8, 48, 16):
                    middles += tuple(pixels[y, x]) in COLOURS.values()
                    corners += tuple(pixels[y + 5, x + 5]) in COLOURS.values()
            assert int(answer) == (corners if words[2] == "squares" else middles - corners)


def test_the_same_question_about_another_picture_is_another_question():
    asked = [question(row["prompt"], row["images"]) for row in (Shapes().to_rlhf(r, 0, "train") for r in rows(n=300))]
    assert len({text.split("image", 1)[0] for text in asked}) < len(set(asked)) == 300


def test_it_is_generated():
    with pytest.raises(DataError, match="reads no --source"):
        Shapes().available("folder")
