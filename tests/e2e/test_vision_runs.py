"""Whole runs of models that see, on two workers: from pictures to a merged model, and on from there with pairs."""

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from posttrain import quickstart
from posttrain.data.parquet import Preference, preference_row, sft_row, write_rows
from posttrain.models.builtin import create_builtin
from posttrain.models.load import locate
from posttrain.models.processors import load_vision
from posttrain.models.vision import TOWER
from posttrain.prep.datasets.shapes import Shapes
from tests.e2e.run_commands import run_commands
from tests.helpers.seeing import MIXED, picture, save_model

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def data(file, count):
    dataset = Shapes()
    rows = [dataset.to_sft(row, i, "train") for i, row in enumerate(dataset.rows("train", None, n=count))]
    write_rows(file, [sft_row(chat) for chat in [*rows, *MIXED]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The commands of docs/vision.md on few rows, with two workers and a frozen tower; then DPO of adapters."""
    folder = tmp_path_factory.mktemp("vision")
    data(folder / "train.parquet", 20)
    data(folder / "val.parquet", 4)
    questions = [Shapes().to_rlhf(row, i, "test") for i, row in enumerate(Shapes().rows("test", None, n=7))]
    two = {**questions[0], "images": [questions[1]["images"][0], {"path": str(folder / "a.png")}]}
    (folder / "a.png").write_bytes(picture(40, 90))
    two["prompt"] = [{"role": "user", "content": "<image> or <image>: how many?"}]
    words = {**questions[0], "images": None, "prompt": [{"role": "user", "content": "How many?"}]}
    write_rows(folder / "prompts.parquet", [*questions, two, words])
    both = {"cluster.device": "cpu", "cluster.workers": 2, "train.vision_tower": "frozen"}
    shorter = {
        "prep": ["--train-rows", "6", "--test-rows", "3"],
        "sft": sets(
            both, **{
                "data.train": "train.parquet", "data.val": "val.parquet", "data.batch_size": 8, "data.max_length": 256,
                "train.tokens_per_microbatch": 128, "train.patches_per_microbatch": 200, "train.steps": 4,
            },
        ),
        "rl": sets(
            both, **{
                "data.train": "prompts.parquet", "data.val": "prompts.parquet", "data.batch_size": 4, "rollout.n": 3,
                "train.steps": 2, "algo.kl_coef": 0.01, "algo.updates_per_step": 2, "rollout.max_prompt_tokens": 128,
            },
        ),
        "generate": ["--data", "prompts.parquet", *sets({"rollout.max_prompt_tokens": 128})],
        "merge-ckpt": ["--dtype", "float32"],
    }  # fmt: skip
    page = (REPO / "docs" / "vision.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    guide = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    pairs = [
        Preference(
            chat.messages[:1], [{"role": "assistant", "content": "#### 3"}], chat.messages[1:2], images=chat.images
        )
        for chat in MIXED
        if len(chat.messages) == 2
    ]
    write_rows(folder / "pairs.parquet", map(preference_row, pairs))
    of_pairs = {"data.train": "pairs.parquet", "data.val": "", "data.batch_size": 4, "train.steps": 1}
    more = [
        ["prefer", "--preset", "tiny-prefer", "--model", "run:tiny-vision", "--set", "train.lora.rank=2"],
        ["merge-ckpt", "tiny-prefer", "--out", "adapted", "--dtype", "float32", "--check"],
    ]
    more[0] += sets(both, **of_pairs)
    run_commands(folder, [*([*words, *shorter.get(words[0], [])] for words in guide), *more])
    return folder


def sets(first, **values):
    pairs = {**first, **values}.items()
    return [word for key, value in pairs for word in ("--set", f"{key}={value!r}")]


def metrics(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_of_the_guide(folder):
    rows = metrics(folder, "tiny-vision-sft")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 < row["train/loss"] < 10 for row in rows)
    assert 0 < rows[-1]["val/loss"] < 10


def test_rl_trains_on_what_the_engine_read(folder):
    """Two workers, two updates a step, a reference: prompts with one image, with two, and with none."""
    rows = metrics(folder, "tiny-vision")
    trained = [row for row in rows if "rollout_gap/mean_abs" in row]
    assert [row["step"] for row in trained] == [1, 2]
    # The engine's log-probabilities are without tokens of images, whose probability is about theirs of the vocabulary.
    assert all(row["rollout_gap/mean_abs"] < 0.01 for row in trained)
    assert all(row["sync/check_gap"] < 1e-4 for row in trained)
    found = pq.read_table(folder / "runs" / "tiny-vision-generate" / "responses.parquet")
    assert found.num_rows == 9
    assert "images" in found.column_names


def test_the_quickstart_on_pictures(tmp_path, monkeypatch):
    """Every stage, on few rows and for two steps."""
    few = {"sft": {"train.steps": 2, "data.batch_size": 4}, "generate": {"rollout.n": 5}}
    few["rl"] = {"train.steps": 2, "data.batch_size": 2, "rollout.n": 2}
    whole = quickstart.resolve
    monkeypatch.setattr(quickstart, "resolve", lambda c, name, flags={}: whole(c, name, flags={**flags, **few[c]}))
    monkeypatch.setattr(Shapes, "default_rows", {"train": 12, "test": 4})
    result = quickstart.run(0, tmp_path / "out", False, False, quickstart.VISION)
    assert list(result["stages"]) == ["base", "sft", "rl"]
    assert load_vision(locate(str(tmp_path / "out" / "merged"))) is not None
    assert quickstart.is_quickstart(tmp_path / "out")


def test_pairs_with_images_are_trained_on(folder):
    """A policy that is its own reference prefers neither answer yet."""
    (row,) = metrics(folder, "tiny-prefer")
    assert row["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert row["train/grad_norm"] > 0


def test_the_tower_is_kept_as_it_was_and_the_rest_is_trained(folder):
    before = create_builtin("tiny-vision", 0).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".visual." in name} == kept


def test_a_model_that_reads_tiles_is_trained_and_merged(tmp_path):
    """SmolVLM: SFT, GRPO with the embedded engine, and a folder that transformers loads."""
    save_model("smolvlm", tmp_path / "model")
    data(tmp_path / "train.parquet", 8)
    questions = [Shapes().to_rlhf(row, i, "test") for i, row in enumerate(Shapes().rows("test", None, n=4))]
    write_rows(tmp_path / "prompts.parquet", questions)
    common = {"cluster.device": "cpu", "train.steps": 2, "train.vision_tower": "frozen"}
    sft = sets(
        common, **{
            "data.train": "train.parquet", "data.val": "", "data.batch_size": 4, "data.max_length": 512,
            "train.patches_per_microbatch": 400, "run.name": "tiles-sft", "model.path": "model",
        },
    )  # fmt: skip
    rl = sets(
        common, **{
            "data.train": "prompts.parquet", "data.val": "", "data.batch_size": 2, "rollout.n": 2,
            "rollout.max_prompt_tokens": 256, "rollout.max_response_tokens": 16, "run.name": "tiles",
            "model.path": "run:tiles-sft",
        },
    )  # fmt: skip
    run_commands(tmp_path, [
        ["sft", "--preset", "tiny-vision-sft", *sft], ["rl", "--preset", "tiny-vision", *rl],
        ["merge-ckpt", "tiles", "--out", "merged", "--dtype", "float32", "--check"],
    ])  # fmt: skip
    assert all(row["rollout_gap/mean_abs"] < 0.01 for row in metrics(tmp_path, "tiles") if row["step"] > 0)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(TOWER)} == kept
    merged, original = (load_vision(locate(str(tmp_path / name))) for name in ("merged", "model"))
    assert merged.processor.to_dict() == original.processor.to_dict()
    assert merged.block((5, 2, 2)).tolist() == original.block((5, 2, 2)).tolist()


def test_the_merged_folder_reads_images_as_the_run_did(folder):
    vision = load_vision(locate(str(folder / "merged")))
    expected = load_vision(locate("builtin:tiny-vision"))
    assert vision.processor.to_dict() == expected.processor.to_dict()
    found = Qwen2VLImageProcessorPil.from_pretrained(folder / "merged")
    assert found.size == expected.processor.size
