"""Models that see: packed rows with images give what each conversation alone gives, on one worker and on two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from posttrain.config import LoraConfig
from posttrain.core.errors import ModelError
from posttrain.models import lora, vision
from posttrain.models.load import ModelSource, build, load_model
from posttrain.models.processors import load_vision
from posttrain.models.support import check_architecture
from posttrain.sft.command import pack
from posttrain.train.flops import model_flops, tower_flops
from posttrain.train.microbatch import MicroBatch
from posttrain.train.model import PackedLM
from posttrain.train.parallel import decoder_layers, parallelize
from tests.helpers.ports import free_ports
from tests.helpers.seeing import (
    CASES,
    FAMILIES,
    SDPA,
    TILED,
    as_transformers_reads,
    exact_gradients,
    gradients,
    packed_batch,
    rendered,
    save_model,
)

CPU = torch.device("cpu")
TOWER = ["frozen", "trained"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {family: save_model(family, tmp_path_factory.mktemp(family)) for family in {*FAMILIES, *TILED}}


def trained_gradients(source, batch, **options):
    """Of one packed row, by our own code; the log-probabilities are under ""."""
    lm = PackedLM(load_model(source, dtype=torch.float32))
    parallelize(lm, None, dtype=torch.float32, activation_checkpointing="none", compiled=False, **options)
    micro = MicroBatch.build(batch, CPU, SDPA, vision=load_vision(source))
    return gradients(lm, micro)


def close(found, expected, *, logprobs, grads):
    torch.testing.assert_close(found[""], expected[""], rtol=0, atol=logprobs)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if name:
            # Where positions are added and not rotated, moving all keys alike changes nothing: there is rounding alone.
            least = 1.0 if ".vision_model." in name and name.endswith("k_proj.bias") else 1e-3
            off = float((found[name] - grad).abs().max()) / (float(grad.abs().max()) + least)
            assert off < grads, f"the gradient of {name} is off by {off:.2g} of its largest element"


@pytest.mark.parametrize("family", [*FAMILIES, "idefics3"])
def test_packed_rows_give_what_each_gives_alone(sources, family):
    source = sources[family]
    rows, see = rendered(source), load_vision(source)
    batch = pack(rows, see)
    batch.loss_weights = batch.loss_mask.float()
    found = trained_gradients(source, batch)
    assert all(float(grad.abs().max()) > 0 for grad in found.values())
    # Each alone in a row of our own.
    singles = [trained_gradients(source, batch.select([b])) for b in range(len(rows))]
    summed = {n: sum(s[n] for s in singles if n in s) for n in found if n} | {"": torch.cat([s[""] for s in singles])}
    close(found, summed, logprobs=2e-6, grads=5e-6)  # rounding: see the next test
    # And by plain transformers, which makes its own positions and reads the images with its own processor.
    model = AutoModelForImageTextToText.from_pretrained(source.path, attn_implementation="eager", dtype=torch.float32)
    logprobs = []
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        inputs = as_transformers_reads(source, row.images)
        if family not in TILED:
            inputs |= {"mm_token_type_ids": (ids == see.image_id).int()[None]}
        logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
        every = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logprobs.append(every[torch.from_numpy(row.mask[1:])])
    (-torch.cat(logprobs).sum()).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    close(found, expected | {"": torch.cat(logprobs).detach()}, logprobs=2e-5, grads=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_itself_changes_nothing(sources, family):
    """In float64 what is packed differs from what is alone by 1e-12, so that in float32 all the rest is rounding: a
    log-probability of -9 has neighbours 1e-6 away."""
    batch = packed_batch(sources[family], "trained")[0]
    found = exact_gradients(sources[family], batch)
    singles = [exact_gradients(sources[family], batch.select([b])) for b in range(batch.num_sequences)]
    summed = {n: sum(s[n] for s in singles if n in s) for n in found if n} | {"": torch.cat([s[""] for s in singles])}
    close(found, summed, logprobs=1e-12, grads=1e-12)
    rounded = trained_gradients(sources[family], batch)
    close({name: value.double() for name, value in rounded.items()}, found, logprobs=4e-6, grads=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_seen_and_stand_in_their_own_sequence(sources, family):
    source = sources[family]
    batch = pack(rendered(source), load_vision(source))
    batch.loss_weights = batch.loss_mask.float()
    before = trained_gradients(source, batch)[""]
    of = torch.repeat_interleave(torch.arange(6), torch.tensor(batch.lengths))[batch.loss_mask]
    batch.images.pixels[: batch.images.patches[0]] //= 2
    moved = (trained_gradients(source, batch)[""] != before).unique_consecutive().tolist()
    assert moved == [True, False]
    assert set(of[trained_gradients(source, batch)[""] != before].tolist()) == {0}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_has_no_gradients_and_changes_no_other(sources, family):
    source = sources[family]
    batch = packed_batch(source, "frozen")[0]
    whole = trained_gradients(source, batch)
    lm = PackedLM(load_model(source, dtype=torch.float32))
    for part in vision.tower(lm.model):
        part.requires_grad_(False)
    found = gradients(lm, MicroBatch.build(batch, CPU, SDPA, vision=load_vision(source)))
    assert found.keys() == {name for name in whole if not name.startswith(vision.TOWER)}
    close(found, {name: whole[name] for name in found}, logprobs=0, grads=1e-6)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_trained_tower_is_checkpointed_too(sources, family, how):
    source = sources[family]
    batch = packed_batch(source, "trained")[0]
    lm = PackedLM(load_model(source, dtype=torch.float32))
    parallelize(lm, None, dtype=torch.float32, activation_checkpointing=how, compiled=False)
    found = gradients(lm, MicroBatch.build(batch, CPU, SDPA, vision=load_vision(source)))
    close(found, trained_gradients(source, batch), logprobs=0, grads=1e-6)


# ---------------------------------------------------------------------- two workers


@pytest.fixture(scope="module")
def two_workers(sources, tmp_path_factory):
    """Two processes have computed every case of every family."""
    folder = tmp_path_factory.mktemp("two")
    cells = [(family, case) for family in FAMILIES for case in CASES]
    ports = map(int, free_ports(len(cells)))
    jobs = [(sources[f].path, c, str(folder / f"{f} {c}"), port) for (f, c), port in zip(cells, ports, strict=True)]
    code = "import json, sys; from tests.helpers.seeing import work; work(int(sys.argv[1]), json.loads(sys.argv[2]))"
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank), json.dumps(jobs)]) for rank in range(2)]
    try:
        assert [process.wait(240) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_two_workers_give_what_one_gives(sources, two_workers, family, case):
    source = sources[family]
    batch, shards = packed_batch(source, case)
    expected = trained_gradients(source, batch)
    if CASES[case].get("vision_tower") != "trained":
        expected = {name: grad for name, grad in expected.items() if not name.startswith(vision.TOWER)}
    found = [load_file(two_workers / f"{family} {case}.{rank}") for rank in range(2)]
    for name, grad in found[0].items():
        assert not name or torch.equal(grad, found[1][name])
    if case == "no image":
        assert all(micro.images is None for rank in shards for micro in rank)
        assert not any(name.startswith(vision.TOWER) for name in found[0])
    parts = [part[""] for part in found[: 1 if case == "shared sequences" else 2]]
    assert sorted(torch.cat(parts).tolist()) == pytest.approx(sorted(expected[""].tolist()), abs=2e-6)
    close(found[0] | {"": expected[""]}, expected, logprobs=0, grads=5e-6)


# ---------------------------------------------------------------------- the model itself


@pytest.mark.parametrize("family", FAMILIES)
def test_its_parts_are_found_and_its_code_is_right_for_packed_rows(sources, family):
    model = build(sources[family], dtype=torch.float32)
    check_architecture(model)
    in_tiles = vision.in_tiles(model.config)
    assert model.config.vision_config._attn_implementation == ("sdpa" if in_tiles else "posttrain_flash")
    assert model.config.text_config._attn_implementation == "posttrain"
    assert len(decoder_layers(model)) == 2
    assert all(layer.self_attn.is_causal for layer in decoder_layers(model))
    names = [name for name, _ in model.named_parameters() if name.startswith(vision.TOWER)]
    assert len(names) == sum(len(list(part.parameters())) for part in vision.tower(model))


def test_layers_of_the_language_model_are_taken_where_the_tower_has_more(sources):
    model = build(sources["qwen2_5_vl"], dtype=torch.float32)
    blocks = vision.tower(model)[0].blocks
    blocks.extend([blocks[0]] * 5)
    assert decoder_layers(model) is model.model.language_model.layers


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2_5_vl", "all-linear"), ("qwen2_5_vl", ["q_proj", "gate_proj"]), ("qwen2_5_vl", r".*gate_proj"),
        ("smolvlm", "all-linear"), ("smolvlm", ["q_proj", "gate_proj"]),
    ],
)  # fmt: skip
def test_adapters_leave_out_a_frozen_tower(sources, family, targets):
    for tower in (False, True):
        model = build(sources[family], dtype=torch.float32)
        lora.inject(model, LoraConfig(rank=2, target_modules=targets), dtype=torch.float32, tower=tower)
        adapted = {name for name, _ in model.named_parameters() if lora.base_name(name) is None}
        assert any("_model.layers.1.mlp.gate_proj" in name for name in adapted)
        assert any(name.startswith(vision.TOWER) for name in adapted) == tower


def test_the_tower_is_counted_by_patches_and_not_by_tokens(sources):
    model = build(sources["qwen2_5_vl"], dtype=torch.float32)
    [seeing] = vision.tower(model)
    for parameter in seeing.parameters():
        parameter.requires_grad_(False)
    rest = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(vision.TOWER))
    assert model_flops(model).forward == 2 * rest
    frozen = tower_flops(model)([36, 4])
    matrices = sum(p.numel() / (4 if "merger" in n else 1) for n, p in seeing.named_parameters() if p.ndim > 1)
    windows = 36 * 16 + 4 * 4  # the first layer's have 16 patches, or all that there are
    assert frozen == pytest.approx(2 * matrices * 40 + 4 * 32 * (36**2 + 4**2 + windows))
    seeing.requires_grad_(True)
    assert tower_flops(model)([36, 4]) == 3 * frozen


def test_a_tower_of_tiles_is_counted_as_torch_counts_it(sources):
    model = load_model(sources["smolvlm"], dtype=torch.float32)
    seeing, connector = vision.tower(model)
    seeing.set_attn_implementation("eager")  # torch counts it
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        connector(seeing(pixel_values=torch.zeros(3, 3, 32, 32)).last_hidden_state)
    assert tower_flops(model)([16, 32]) == 3 * counted.get_total_flops()


def test_a_model_without_settings_for_images_is_refused(sources, tmp_path):
    for file in Path(sources["qwen2_5_vl"].path).iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        load_vision(ModelSource(str(tmp_path)))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the image processor"):
        load_vision(ModelSource(str(tmp_path)))


def test_settings_for_images_are_read_as_releases_write_them(sources, tmp_path):
    """As pixels (Qwen2.5-VL), as sizes (Qwen3-VL), and in processor_config.json; one model's are not another's."""
    for file in Path(sources["qwen2_5_vl"].path).iterdir():
        (tmp_path / file.name).symlink_to(file)
    default = dict(Qwen2VLImageProcessorPil.size)
    own = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 400, "longest_edge": 900}
    for name, settings in (
        ("preprocessor_config.json", {**own, "min_pixels": 400, "max_pixels": 900}),
        ("preprocessor_config.json", {**own, "size": {"min_pixels": 400, "max_pixels": 900}}),
        ("preprocessor_config.json", {**own, "size": size}),
        ("processor_config.json", {"image_processor": {**own, "size": size}, "processor_class": "Any"}),
    ):
        (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
        (tmp_path / name).write_text(json.dumps(settings))
        processor = load_vision(ModelSource(str(tmp_path))).processor
        assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (400, 900)
        assert Qwen2VLImageProcessorPil.size == default
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**own, "patch_size": 14}))
    with pytest.raises(ModelError, match="cut with patch_size = 14, and the config makes it 8"):
        load_vision(ModelSource(str(tmp_path)))


def test_a_model_of_text_reads_no_images():
    assert load_vision(ModelSource("builtin:tiny")) is None
