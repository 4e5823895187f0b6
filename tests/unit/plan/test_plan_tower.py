"""The vision tower in plans: its parameters, FLOPs and activations beside those of real models, and images of data."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from posttrain.config import Config, LoraConfig
from posttrain.core.machines import Machine, gpu_named
from posttrain.data.images import RawImage
from posttrain.data.parquet import write_rows
from posttrain.engines.choice import EngineChoice
from posttrain.models import lora, vision
from posttrain.models.builtin import builtin_config
from posttrain.models.load import locate
from posttrain.models.processors import load_vision
from posttrain.plan.batch import assumed_lengths
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.images import PixelLimits, images_of, limits_of, patches_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Shapes
from posttrain.plan.shape import shape_of
from posttrain.prep.datasets.shapes import Shapes as ShapesData
from posttrain.train.flops import tower_forward
from tests.helpers.seeing import FAMILIES, TILED, config_of, picture

GRID_FAMILIES = [family for family in FAMILIES if family not in TILED]
CONFIGS = {family: lambda family=family: config_of(family) for family in GRID_FAMILIES}
CONFIGS["builtin"] = lambda: builtin_config("tiny-vision")
PATCHES, GRIDS = (64, 32), ((1, 8, 8), (1, 4, 8))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_flops_are_those_of_the_model(name):
    config = CONFIGS[name]()
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    [seeing], shape = vision.tower(model), shape_of(config.to_dict(), name)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.of_tower == sum(p.numel() for p in seeing.parameters())
    assert shape.tower.flops() == tower_forward([seeing], config.vision_config, 2)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        seeing(torch.randn(sum(PATCHES), shape.tower.values), grid_thw=torch.tensor(GRIDS))
    assert counted.get_total_flops() == shape.tower.flops().forward(PATCHES)
    adapters = LoraConfig(rank=2)
    lora.inject(model, adapters, dtype=torch.float32, tower=True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.lora_parameters(adapters, tower=True) == trained


def saved_bytes(config):
    """What autograd keeps of a tower's forward pass, weights apart."""
    [seeing] = vision.tower(
        AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    )
    weights, found = {p.untyped_storage()._cdata for p in seeing.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage.nbytes(), storage  # held, or its address would be used again
        return tensor

    values = shape_of(config.to_dict(), "").tower.values
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = seeing(torch.randn(64, values), grid_thw=torch.tensor([(1, 8, 8)])).pooler_output
    out.float().sum().backward()
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_a_block_keeps_what_autograd_keeps(family):
    found = []
    for depth in (2, 4):
        config = config_of(family)
        config.vision_config.depth = depth
        if family == "qwen2_5_vl":
            config.vision_config.fullatt_block_indexes = list(range(depth))
        found.append(saved_bytes(config))
    tower = shape_of(config.to_dict(), family).tower
    assert (found[1] - found[0]) / 2 == 64 * tower.of_block(2, "none")


def test_published_sizes():
    """Parameters as those count who load the weights of the hub: mteb's entries of models that are trained from the
    two of Qwen2.5-VL have the first two numbers, and published logs of runs of Qwen3-VL the third. Sizes are those of
    the config.json files that several public repositories hold."""
    found = {name: shape_of(sizes, name) for name, sizes in known_models().items() if "-VL-" in name}
    assert {name: shape.parameters for name, shape in found.items()} == {
        "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
        "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
        "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    }


def test_an_image_has_the_patches_that_the_processor_gives_it(tmp_path):
    processor, tower = load_vision(locate("builtin:tiny-vision")), shape_of(builtin_config("tiny-vision").to_dict(), "")
    limits = limits_of(processor.processor.to_dict(), tower.tower)
    assert limits == PixelLimits(32 * 32, 64 * 64)
    for height, width in [(1, 9), (16, 16), (40, 40), (48, 48), (64, 64), (65, 33), (128, 128), (500, 37), (300, 301)]:
        _, rows, columns = processor.grid(RawImage(picture(height, width)))
        assert patches_of(height, width, tower.tower, limits) == rows * columns, (height, width)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three rows with an image of 36 patches each, and one without."""
    file = tmp_path_factory.mktemp("data") / "train.parquet"
    dataset = ShapesData()
    rows = [dataset.to_rlhf(row, i, "train") for i, row in enumerate(dataset.rows("train", None, n=4))]
    write_rows(file, [*rows[:3], {**rows[3], "images": None}])
    return str(file)


def question(data, **sections):
    tree = {"model": {"path": "m"}, "data": {"train": data, "batch_size": 8, "max_length": 1024}, "train": {"steps": 1}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    cfg = Config.model_validate({"command": "sft", **tree})
    shape = shape_of(known_models()["Qwen/Qwen2.5-VL-3B-Instruct"], "m")
    images = images_of(cfg, shape.tower, PixelLimits(48 * 48, 64 * 64))
    lengths = replace(assumed_lengths(cfg), images=images)
    kernels = Kernels(True, 2, False, EngineChoice("hf", ""))
    return Question(cfg, Shapes(shape), Machine(gpu_named("h100"), 1), kernels, lengths)


def test_images_of_the_data_are_counted(data):
    images = question(data).lengths.images
    assert (images.count, images.patches, images.source) == (0.75, 16, "the first 4 rows")
    assert not question("nowhere.parquet").lengths.images.source


def test_a_trained_tower_takes_more_memory_and_time_than_a_frozen_one(data):
    frozen, trained = (Plan(question(data, train={"vision_tower": how})) for how in ("frozen", "trained"))
    tower = frozen.question.shapes.actor.of_tower
    one, other = frozen.layout.actor, trained.layout.actor
    assert other.trained - one.trained == tower
    assert other.moments() - one.moments() == 8 * tower
    assert other.fresh()["parameters"] - one.fresh()["parameters"] == (4 - 2) * tower
    assert other.update()["images"] > one.update()["images"] > 0
    assert trained.phases["update"].compute > frozen.phases["update"].compute


def test_patches_of_a_micro_batch_follow_the_data_and_the_budget(data):
    """Of 1024 tokens a row 0.75 images of 16 patches; without the data four patches for each token."""
    tokens = Plan(question(data)).batch.worst
    assert Plan(question(data)).layout.actor.patches == -(-tokens * 12 // 1024)
    assert Plan(question("nowhere.parquet")).layout.actor.patches == 4 * tokens
    budget = {"patches_per_microbatch": 100}
    assert Plan(question("nowhere.parquet", train=budget)).layout.actor.patches == 100
