"""The vision tower in plans: its parameters, FLOPs and activations beside those of real models, and images of data."""

import gc
import io
import json
import math
import random
import shutil
import statistics
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import Config, LoraConfig
from posttrain.core.errors import ModelError
from posttrain.core.machines import Machine, gpu_named
from posttrain.data.bins import assign
from posttrain.data.images import RawImage
from posttrain.data.parquet import write_rows
from posttrain.data.tiling import Tiling
from posttrain.engines.choice import EngineChoice
from posttrain.models import attention, lora, tower_attention, vision
from posttrain.models.builtin import builtin_config
from posttrain.models.load import ModelSource, implementations, locate
from posttrain.models.processors import load_vision
from posttrain.plan.batch import Lengths, assumed_lengths, patches_at_most
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.images import ImageLoad, PixelLimits, cut, images_of, sizing_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Shapes
from posttrain.plan.shape import shape_of
from posttrain.prep.datasets.shapes import Shapes as ShapesData
from posttrain.train import parallel
from posttrain.train.flops import tower_flops, tower_forward
from posttrain.train.model import PackedLM
from posttrain.train.parallel import largest_list
from tests.helpers.seeing import FAMILIES, TILED, config_of, picture, processor_of, save_text_side, text_source
from tests.unit.plan.test_plan_activations import varlen

EVERY = sorted({*FAMILIES, *TILED})
CONFIGS = {family: lambda family=family: config_of(family) for family in EVERY}
CONFIGS["builtin"] = lambda: builtin_config("tiny-vision")
GRIDS = {True: ((2, 4, 4), (4, 4, 4)), False: ((1, 8, 8), (1, 4, 8))}
"""By whether a tower reads tiles"""


def model_of(config, depth=None, **how):
    """A model, with so many blocks in its tower, all of which look at a whole image if it is not cut. Attention is
    that of runs unless told otherwise."""
    if depth is not None:
        setattr(config.vision_config, "num_hidden_layers" if vision.in_tiles(config) else "depth", depth)
    if depth is not None and config.model_type == "qwen2_5_vl":
        config.vision_config.fullatt_block_indexes = list(range(depth))
    model = AutoModelForImageTextToText.from_config(config, **(implementations(config) | how))
    if "attn_implementation" not in how:
        model.set_attn_implementation(vision.attention_of(config, attention.NAME))
    return model


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention of towers keeps what a kernel over ragged rows does."""
    monkeypatch.setattr(
        tower_attention, "_by_length", lambda q, k, v, *_: varlen(*(x.contiguous() for x in (q, k, v)))[0]
    )
    monkeypatch.setattr(parallel, "_EXPENSIVE", parallel._EXPENSIVE | {"plantest.varlen.default"})


def seen(model, grids):
    """What the tower makes of images of noise, in the same way as training does."""
    values = shape_of(model.config.to_dict(), "").tower.values
    grids = torch.tensor(grids)
    return vision.features_of(model, torch.randn(int(grids.prod(1).sum()), values), grids)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_flops_are_those_of_the_model(name):
    config = CONFIGS[name]()
    model, shape = model_of(config, attn_implementation="eager"), shape_of(config.to_dict(), name)
    parts, grids = vision.tower(model), GRIDS[vision.in_tiles(config)]
    patches = [math.prod(grid) for grid in grids]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.of_tower == sum(p.numel() for part in parts for p in part.parameters())
    assert shape.tower.flops() == tower_forward(parts, config.vision_config, 2)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        seen(model, grids)
    assert counted.get_total_flops() == shape.tower.flops().forward(patches)
    with FlopCounterMode(display=False) as counted:
        features = seen(model, grids)
        torch.cat([features.last, *features.deeper]).sum().backward()
    pixels = 2 * sum(patches) * shape.tower.values * shape.tower.hidden  # nobody asks for the gradient of these
    assert counted.get_total_flops() == tower_flops(model)(patches) - pixels
    adapters = LoraConfig(rank=2)
    lora.inject(model, adapters, dtype=torch.float32, tower=True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.lora_parameters(adapters, tower=True) == trained


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors that are made and not given up; those of weights and arguments apart."""

    def __init__(self, *others):
        super().__init__()
        self.known, self.bytes, self.most = {tensor.untyped_storage()._cdata for tensor in others}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.bytes += storage.nbytes()
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self._given_up, storage._cdata, storage.nbytes())
        return out

    def _given_up(self, address, size):
        self.known.discard(address)
        self.bytes -= size


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", EVERY)
def test_a_block_keeps_what_autograd_keeps(family, checkpointing, as_on_a_gpu):
    found = []
    for depth in (2, 4):
        config = config_of(family)
        model = model_of(config, depth, dtype=torch.bfloat16)
        parallel.parallelize(
            PackedLM(model), None, dtype=torch.bfloat16, activation_checkpointing=checkpointing, compiled=False
        )
        with LiveBytes(*model.parameters()) as live:
            out = seen(model, GRIDS[vision.in_tiles(config)][1:])
            gc.collect()
        found.append(live.bytes)
        assert out.last.requires_grad
    patches, tower = math.prod(GRIDS[vision.in_tiles(config)][1]), shape_of(config.to_dict(), family).tower
    assert (found[1] - found[0]) / 2 == patches * tower.of_block(2, checkpointing, compiled=False)


@pytest.mark.slow  # to compile takes seconds
@pytest.mark.parametrize("family", EVERY)
def test_a_compiled_block_keeps_what_autograd_keeps(family, as_on_a_gpu, monkeypatch):
    found = []
    for depth in (2, 4):
        config, kept = config_of(family), {}
        model = model_of(config, depth, dtype=torch.bfloat16)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor, weights=weights, kept=kept):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes(), storage  # held, or its address would be used again
            return tensor

        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            # What is kept is decided before code is made for it.
            patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
            parallel.parallelize(
                PackedLM(model), None, dtype=torch.bfloat16, activation_checkpointing="none", compiled=True
            )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = seen(model, GRIDS[vision.in_tiles(config)][1:])
        found.append(sum(size for size, _ in kept.values()))
        out.last.float().sum().backward()
    patches, tower = math.prod(GRIDS[vision.in_tiles(config)][1]), shape_of(config.to_dict(), family).tower
    assert (found[1] - found[0]) / 2 == patches * tower.of_block(2, "none", compiled=True)


@pytest.mark.parametrize("width", [40, 640])
@pytest.mark.parametrize("family", EVERY)
def test_a_block_holds_what_is_reckoned_without_a_backward_pass(family, width, as_on_a_gpu):
    """The most is held in attention, or with a wide MLP there."""
    config = config_of(family)
    config.vision_config.intermediate_size = width
    model = model_of(config, 2, dtype=torch.bfloat16)
    blocks, found = largest_list(vision.tower(model)[0]), []

    def forward(hidden, *args, plain=blocks[1].forward, **kwargs):
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        with LiveBytes(*model.parameters(), hidden, *given) as live:
            out = plain(hidden, *args, **kwargs)
        found.append(live.most + hidden.nbytes)
        return out

    blocks[1].forward = forward
    with torch.no_grad():
        seen(model, GRIDS[vision.in_tiles(config)][1:])
    patches = math.prod(GRIDS[vision.in_tiles(config)][1])
    reckoned = patches * shape_of(config.to_dict(), family).tower.forward_only(2)
    assert reckoned <= found[0] <= reckoned + 16  # where sequences begin


def test_published_sizes():
    """Parameters as those count who load the weights of the hub: mteb's entries of models that are trained from the
    two of Qwen2.5-VL have the first two numbers, published logs of runs of Qwen3-VL the third, and records of
    several public repositories those of SmolVLM2. Sizes are those of the config.json files that such repositories
    hold."""
    found = {name: shape_of(sizes, name) for name, sizes in known_models().items() if "VL" in name}
    assert {name: shape.parameters for name, shape in found.items()} == {
        "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
        "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
        "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
        "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": 256_484_928,
        "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": 507_482_304,
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2_246_784_880,
    }
    assert found["HuggingFaceTB/SmolVLM2-500M-Video-Instruct"].of_tower == 86_433_024 + 11_796_480


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize("size", ["256M-Video", "2.2B", "nothing is said"])
def test_releases_whose_config_leaves_sizes_out_are_as_transformers_builds_them(family, size):
    """With the FLOPs of an image of seventeen tiles, as torch counts them of tensors without values."""
    bare = {"text_config": {"num_key_value_heads": 8}, "vision_config": {"model_type": f"{family}_vision"}}
    sizes = known_models().get(f"HuggingFaceTB/SmolVLM2-{size}-Instruct", bare)
    config = AutoConfig.for_model(family, **{key: value for key, value in sizes.items() if key != "model_type"})
    with torch.device("meta"):
        model = model_of(config, dtype=torch.bfloat16, attn_implementation="eager")
    shape = shape_of(sizes, size)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    # A tile of 7 x 7 patches has a row too many for features of 2 x 2; no release has such tiles.
    if size != "nothing is said":
        tower, (seeing, connector) = shape.tower, vision.tower(model)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            pixels = torch.empty(17, 3, tower.tile, tower.tile, dtype=torch.bfloat16, device="meta")
            patches = seeing.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            connector(seeing.encoder(patches).last_hidden_state.contiguous())
        assert counted.get_total_flops() == tower.flops().forward([17 * tower.window**2])


def test_an_image_has_the_patches_that_the_processor_gives_it():
    processor, shape = load_vision(locate("builtin:tiny-vision")), shape_of(builtin_config("tiny-vision").to_dict(), "")
    limits = sizing_of(processor.processor.to_dict(), shape.tower)
    assert limits == PixelLimits(32 * 32, 64 * 64)
    for height, width in [(1, 9), (16, 16), (40, 40), (48, 48), (64, 64), (65, 33), (128, 128), (500, 37), (300, 301)]:
        grid = processor.grid(RawImage(picture(height, width)))
        assert cut(height, width, shape.tower, limits) == (math.prod(grid), len(processor.block(grid)))


SIZES = [(1, 1), (36, 36), (37, 36), (64, 64), (65, 64), (33, 64), (64, 20), (200, 31), (31, 200), (1, 300), (150, 149)]
SIZES += [tuple(sides) for sides in np.random.default_rng(0).integers(1, 260, (60, 2)).tolist()]


@pytest.mark.parametrize(
    "settings", [{}, {"size": {"longest_edge": 180}}, {"do_resize": False}, {"do_image_splitting": False}], ids=str
)
@pytest.mark.parametrize("family", TILED)
def test_an_image_has_the_tiles_and_tokens_that_transformers_makes_of_it(tmp_path, family, settings):
    """Sizes are of all proportions; two line breaks are two tokens of this tokenizer."""
    settings = {**processor_of(family), **settings}
    save_text_side(family, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    reader, tower = load_vision(ModelSource(str(tmp_path))), shape_of(config_of(family).to_dict(), "").tower
    theirs = Idefics3Processor(reader.processor, reader.tokenizer, image_seq_len=4)
    sizing, shapes = sizing_of(settings, tower, tmp_path), set()
    for height, width in SIZES:
        image = RawImage(picture(height, width))
        made = theirs(text="<image>", images=[image.decode()], add_special_tokens=False)
        tiles = len(made["pixel_values"][0])
        assert cut(height, width, tower, sizing) == (tiles * 16, len(made["input_ids"][0])), (height, width)
        assert reader.grid(image)[0] == tiles
        shapes.add(tiles)
    assert len(shapes) > 1 or not settings.get("do_image_splitting", True)


def test_without_a_model_an_image_is_cut_as_releases_do():
    """Sides of 2048 pixels, tiles of 512, and 64 features of each are in the published files of SmolVLM2-500M. The last
    row's line break and the one after it are one token."""
    tower = shape_of(known_models()["HuggingFaceTB/SmolVLM2-500M-Video-Instruct"], "").tower
    sizing = sizing_of({}, tower)
    assert sizing.tiling == Tiling(512, 2048)
    assert cut(300, 300, tower, sizing) == (17 * 1024, 17 * 64 + 16 * 2 + 4 + 3)
    assert cut(1000, 2000, tower, sizing) == (9 * 1024, 9 * 64 + 8 * 2 + 2 + 3)
    assert cut(300, 300, tower, sizing_of({"do_image_splitting": False}, tower)) == (1024, 64 + 3)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    tower = shape_of(config_of("smolvlm").to_dict(), "").tower
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        sizing_of({}, tower, tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three rows with an image of 36 patches each, and one without."""
    file = tmp_path_factory.mktemp("data") / "train.parquet"
    dataset = ShapesData()
    rows = [dataset.to_rlhf(row, i, "train") for i, row in enumerate(dataset.rows("train", None, n=4))]
    write_rows(file, [*rows[:3], {**rows[3], "images": None}])
    return str(file)


def training_on(data, **sections):
    tree = {"model": {"path": "m"}, "data": {"train": data, "batch_size": 8, "max_length": 1024}, "train": {"steps": 1}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate({"command": "sft", **tree})


def question(data, **sections):
    cfg = training_on(data, **sections)
    shape = shape_of(known_models()["Qwen/Qwen2.5-VL-3B-Instruct"], "m")
    images = images_of(cfg, shape.tower, PixelLimits(48 * 48, 64 * 64))
    lengths = replace(assumed_lengths(cfg), images=images)
    kernels = Kernels(True, 2, False, EngineChoice("hf", ""))
    return Question(cfg, Shapes(shape), Machine(gpu_named("h100"), 1), kernels, lengths)


def test_images_of_the_data_are_counted(data):
    images = question(data).lengths.images
    assert images == ImageLoad(0.75, 16, 4, ((16, 4), (16, 4), (16, 4), (0, 0)), "the first 4 rows")
    assert not question("nowhere.parquet").lengths.images.source


def test_a_photo_is_cut_as_it_is_turned_by_its_exif_data(tmp_path):
    """Three columns of one tile have one line break fewer than three rows."""
    tower = shape_of(config_of("smolvlm").to_dict(), "").tower
    tiles = sizing_of({"size": {"longest_edge": 108}}, tower)
    for orientation, sides in [(1, (36, 108)), (3, (36, 108)), (6, (108, 36)), (8, (108, 36))]:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        for kind in ("JPEG", "PNG", "WEBP"):
            file = io.BytesIO()
            Image.new("RGB", (108, 36)).save(file, kind, exif=exif)
            image = RawImage(file.getvalue())
            assert (image.decode().height, image.decode().width) == sides == image.size()
            write_rows(tmp_path / "rows.parquet", [{"images": [{"bytes": image.data, "path": None}]}])
            load = images_of(training_on(str(tmp_path / "rows.parquet")), tower, tiles)
            assert (load.patches, load.tokens) == cut(*sides, tower, tiles)
    assert cut(36, 108, tower, tiles) != cut(108, 36, tower, tiles)


def test_tiles_are_sampled_by_the_embedded_engine(tmp_path):
    """As the run itself says before it starts."""
    options = ["--preset", "tiny-vision", "--model", text_source("smolvlm", tmp_path / "m").path, "--gpu", "h100"]
    for engine, given in (("hf", []), ("sglang", [["rollout.engine=hf"]]), ("vllm", [["rollout.engine=hf"]])):
        done = CliRunner().invoke(app, ["plan", *options, "--json", "--set", f"rollout.engine={engine}"])
        found = [p["set"] for p in json.loads(done.stdout)["problems"] if "images in tiles" in p["message"]]
        assert found == ([given] if given else [])


@pytest.mark.parametrize("family", EVERY)
def test_a_plan_adds_tokens_of_images_to_lengths_of_the_card(tmp_path, data, family):
    """With a model's folder, and as a command."""
    shutil.copy(data, tmp_path / "train.parquet")
    (tmp_path / "train.parquet.card.json").write_text(
        json.dumps({"lengths": {"conversation in the chat template, tokens": {"mean": 20.0}}})
    )
    source = text_source(family, tmp_path / "m")
    reader, image = load_vision(source), ShapesData().to_rlhf(next(iter(ShapesData().rows("train", None, n=1))), 0, "")
    grid = reader.grid(RawImage.of(image["images"][0]))
    options = ["--preset", "tiny-vision-sft", "--model", source.path, "--gpu", "h100", "--json"]
    done = CliRunner().invoke(app, ["plan", *options, "--set", f"data.train={tmp_path / 'train.parquet'}"])
    assert done.exit_code == 0, done.stderr
    batch = json.loads(done.stdout)["batch"]
    tokens, patches = len(reader.block(grid)), math.prod(reader.patch_grid(grid))
    assert (batch["images"], batch["tokens_of_image"], batch["patches_of_image"]) == (0.75, tokens, patches)
    assert batch["mean_length"] == 20 + 0.75 * (tokens - 1)


def test_a_trained_tower_takes_more_memory_and_time_than_a_frozen_one(data):
    frozen, trained = (Plan(question(data, train={"vision_tower": how})) for how in ("frozen", "trained"))
    tower = frozen.question.shapes.actor.of_tower
    one, other = frozen.layout.actor, trained.layout.actor
    assert other.trained - one.trained == tower
    assert other.moments() - one.moments() == 8 * tower
    assert other.fresh()["parameters"] - one.fresh()["parameters"] == (4 - 2) * tower
    assert other.update()["images"] > one.update()["images"] > 0
    assert trained.phases["update"].compute > frozen.phases["update"].compute


@pytest.mark.parametrize("seed", range(10))
def test_images_that_are_large_come_together(seed):
    """In the micro-batch with the most, as a run divides them: by tokens, of which large images have more."""
    draw = random.Random(seed)
    text, tokens_of = draw.randint(100, 700), [draw.choice([50, 100, draw.randint(200, 400)]) for _ in range(64)]
    lengths, budget = [text + tokens for tokens in tokens_of], draw.randint(4096, 16384)
    [placed] = assign(lengths, ranks=1, token_budget=budget)
    found = max(sum(4 * tokens_of[i] for i in micro) for micro in placed)
    largest = max(sum(lengths[i] for i in micro) for micro in placed)
    first = [draw.choice(tokens_of) for _ in range(64)]  # the rows that are looked at are others than those of a step
    mean = statistics.mean(first)
    load = ImageLoad(1.0, 4 * mean, mean, tuple((4 * tokens, tokens) for tokens in first), "the first 64 rows")
    cfg = training_on("", train={"tokens_per_microbatch": budget})
    reckoned = patches_at_most(cfg, Lengths(text + mean, 1024, images=load), largest, 4)
    assert 0.85 * found <= reckoned <= 1.25 * found


def test_patches_of_a_micro_batch_follow_the_data_and_the_budget(data):
    """Of 1024 tokens a row 0.75 images of 16 patches, so that six of eight rows have one; without the data four patches
    for each token."""
    tokens = Plan(question(data)).batch.worst
    assert Plan(question(data)).layout.actor.patches == -(-tokens * 12 // 1024)
    assert Plan(question("nowhere.parquet")).layout.actor.patches == 4 * tokens
    budget = {"patches_per_microbatch": 100}
    assert Plan(question("nowhere.parquet", train=budget)).layout.actor.patches == 100
