"""What a run with engines in FP8 is told before it starts, and what is refused."""

import pytest

from posttrain.config import Config
from posttrain.config.cluster import tolerance
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError
from posttrain.core.machines import GPUS, Machine
from posttrain.models.load import ModelSource
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.runs import preflight, quantization
from posttrain.runs.quantization import check_quantization

FP8 = {"quantization": "fp8"}


def config(command="rl", rollout=None, **sections):
    return Config.model_validate({"command": command, "run": {"name": "x"}, "rollout": rollout or FP8, **sections})


def check(model="builtin:tiny", **sections):
    return check_quantization(config(**sections), ModelSource(model))


@pytest.fixture
def on_gpu(monkeypatch):
    """A machine with a GPU of a name."""

    def pretend(name="h200"):
        gpu = next(gpu for gpu in GPUS if gpu.name == name)
        monkeypatch.setattr(preflight, "has_gpu", lambda: True)
        monkeypatch.setattr(quantization, "this_machine", lambda: Machine(gpu))

    return pretend


def test_token_weights_correct_for_engines_in_fp8_unless_the_config_says_otherwise():
    assert config(rollout={"engine": "hf"}).correction.weight == "none"
    assert config().correction.weight == "token"
    assert config(rollout={"engine": "vllm", "kv_cache_dtype": "fp8"}).correction.weight == "token"
    assert config(algo={"correction": {"weight": "none"}}).correction.weight == "none"
    assert config(algo={"correction": {"weight": "sequence"}}).correction.weight == "sequence"


def test_the_weight_sync_check_has_a_tolerance_of_its_own():
    assert tolerance("float32") < tolerance("bfloat16") < tolerance("bfloat16", fp8=True)
    assert tolerance("float32", fp8=True) == tolerance("bfloat16", fp8=True)


def test_a_run_is_told_what_is_quantized_and_how_the_loss_is_corrected():
    assert check(rollout=FP8 | {"engine": "hf"}) == [
        "engines compute in FP8: 100 % of the linear layers' weights, in blocks of 64 x 64",
        "the loss is corrected for that: algo.correction.weight = 'token', cut at 2",
    ]
    band = {"correction": {"lower": 0.5, "upper": 5.0}}
    assert check(algo=band)[-1].endswith("algo.correction.weight = 'token', 0 outside 0.5 to 5")
    off = check(algo={"correction": {"weight": "none"}})
    assert off[-1] == "warning: algo.correction.weight = 'none': nothing corrects the loss for engines in FP8"
    assert len(check(rollout=FP8 | {"only": True})) == 1
    assert len(check(command="generate")) == 1
    assert check(rollout={"engine": "hf"}) == []


def test_a_kv_cache_in_fp8_alone_is_corrected_for_too(on_gpu):
    on_gpu()
    [line] = check(rollout={"engine": "sglang", "kv_cache_dtype": "fp8"})
    assert line.startswith("the loss is corrected for that")


def test_the_notes_of_a_run_have_these_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prep.run("arith", out="data/arith", train_rows=16, test_rows=8)
    changes = ["rollout.quantization=fp8", "model.path='builtin:tiny'"]
    job = rl.prepare(preflight.with_engine(resolve("rl", "tiny-arith", sets=changes)))
    notes = list(job.notes())
    assert any("in blocks of 64 x 64" in note for note in notes)
    assert any("algo.correction.weight = 'token'" in note for note in notes)


VLLM, SGLANG = FP8 | {"engine": "vllm"}, FP8 | {"engine": "sglang"}
BFLOAT16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("gpu", "sections", "message"),
    [
        (None, {"rollout": VLLM}, "'vllm' and train.dtype float32: such kernels have activations in bfloat16"),
        ("h200", {"rollout": SGLANG, "train": {"dtype": "float32"}}, "'sglang' and train.dtype float32"),
        ("h200", {"rollout": SGLANG | {"batch_invariant": True}}, "are not batch-invariant"),
        ("a100", {"rollout": SGLANG}, "'sglang': A100 does not multiply in FP8"),
        ("3090", {"rollout": VLLM}, "'vllm': RTX 3090 does not multiply in FP8"),
        (None, {"rollout": VLLM, "train": BFLOAT16, "model": "builtin:tiny-moe"}, "cannot take new ones"),
        (None, {"rollout": {"kv_cache_dtype": "fp8"}}, "rollout.engine = 'hf' on a CPU: its KV cache has the compute"),
        (None, {"rollout": {"engine": "vllm", "kv_cache_dtype": "fp8"}}, "'vllm' on a CPU"),
        (
            None,
            {"command": "generate", "generate": {"endpoint": {"url": "http://localhost:1/v1"}}},
            "no effect with generate.endpoint",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(gpu, sections, message, on_gpu):
    if gpu is not None:
        on_gpu(gpu)
    with pytest.raises(ConfigError) as error:
        check(**sections)
    assert message in error.value.message
    assert "--set" in error.value.hint


@pytest.mark.parametrize("name", ["h200", "h100", "l40s", "l4", "4090", "b200"])
def test_gpus_with_fp8_are_not_refused(name, on_gpu):
    on_gpu(name)
    assert len(check(rollout=SGLANG)) == 2


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (FP8 | {"replay": "x"}, "rollout.quantization has no effect with rollout.replay"),
        ({"kv_cache_dtype": "fp8", "replay": "x"}, "rollout.kv_cache_dtype has no effect with rollout.replay"),
        ({"kv_cache_dtype": "fp8", "engine": "hf"}, "its KV cache has the compute type"),
    ],
)
def test_settings_without_effect_are_refused(rollout, message):
    with pytest.raises(ValueError, match=message):
        config(rollout=rollout)


def test_models_that_read_images_are_refused():
    with pytest.raises(ConfigError, match=r"rollout\.quantization = 'fp8' is not for models that read images"):
        check("builtin:tiny-vision", rollout=FP8 | {"engine": "hf"})
