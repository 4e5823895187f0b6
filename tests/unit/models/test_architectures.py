"""Every cell of docs/models.md, on tiny models of transformers' own classes."""

import json
from dataclasses import replace

import pytest
import torch

from posttrain.config import LoraConfig
from posttrain.core.errors import ConfigError, ModelError
from posttrain.engines import classes
from posttrain.engines.classes import check_model_class, has_class
from posttrain.models import lora
from posttrain.models.load import build, load_model
from posttrain.models.support import PROVEN, check_architecture, is_proven
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.model_checks import FEATURES, RECORDED, Bench, check, record, row, run_two_workers

STORED = json.loads(RECORDED.read_text(encoding="utf-8"))
TABLE = STORED["architectures"]
TWO_WORKERS = ("fsdp", "sequence_parallel")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """A tiny model of each architecture, made when it is asked for first."""
    made = {}

    def bench(name):
        if name not in made:
            made[name] = Bench(name, tmp_path_factory.mktemp("architecture"))
        return made[name]

    return bench


@pytest.fixture(scope="module")
def two_workers(benches):
    """Two processes have computed what every architecture does, shared among them."""
    run_two_workers([benches(name) for name in ARCHITECTURES])


def cells():
    for name in ARCHITECTURES:
        for feature in FEATURES:
            marks = [] if feature == "packed" else [pytest.mark.slow]
            yield pytest.param(name, feature, marks=marks, id=f"{name}-{feature}")


@pytest.mark.parametrize(("name", "feature"), list(cells()))
def test_a_cell_is_right_or_refused_as_the_page_says(request, benches, name, feature):
    templates = None
    if feature == "tools" and ARCHITECTURES[name].tools == "hermes":
        templates = request.getfixturevalue("test_data") / "tokenizer" / "templates"
    if feature in TWO_WORKERS:
        request.getfixturevalue("two_workers")
    assert check(benches(name), feature, templates) == TABLE[name]["cells"][feature]


def test_the_table_is_of_these_architectures_and_features(benches):
    assert record(TABLE) == STORED
    assert list(TABLE) == list(ARCHITECTURES)
    for name, recorded_row in TABLE.items():
        assert list(recorded_row["cells"]) == list(FEATURES)
        assert recorded_row == row(benches(name), recorded_row["cells"])
        assert {cell["result"] for cell in recorded_row["cells"].values()} <= {"right", "refused"}


def test_what_an_engine_has_no_class_for_is_refused_where_its_layers_have_a_state(benches):
    """And an engine that is newer than the record judges for itself."""
    model = build(benches("Qwen3.5 (text)").source, dtype=torch.float32)
    assert has_class("Qwen3_5ForCausalLM", "vllm")
    check_model_class(model, "vllm")
    with pytest.raises(ConfigError, match=r"sglang: 0\.5\.16 has no class for Qwen3_5ForCausalLM") as error:
        check_model_class(model, "sglang")
    assert error.value.hint == "--set rollout.engine=vllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "installed_version", lambda engine: "0.5.99")
        check_model_class(model, "sglang")


def test_weights_that_checkpoints_hold_joined_do_not_go_to_sglang_or_vllm():
    from transformers import HrmTextConfig, HrmTextForCausalLM

    with torch.device("meta"):
        model = HrmTextForCausalLM(
            HrmTextConfig(vocab_size=64, hidden_size=48, intermediate_size=80, num_attention_heads=4)
        )
    with pytest.raises(ConfigError, match="hold several weights joined in one"):
        check_model_class(model, "vllm")


def test_the_driver_takes_for_proven_what_the_page_shows_to_be_right():
    import transformers

    right = {
        getattr(transformers, ARCHITECTURES[name].config).model_type
        for name, found in TABLE.items()
        if all(cell["result"] == "right" for cell in found["cells"].values())
    }
    assert right == PROVEN


def test_a_proven_type_with_code_or_positions_of_its_own_is_looked_at(benches):
    config = build(benches("Llama").source, dtype=torch.float32).config
    assert is_proven(config)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    assert not is_proven(config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config.auto_map = {"AutoModelForCausalLM": "modeling.Own"}
    assert not is_proven(config)


def test_rotary_embeddings_that_depend_on_the_longest_sequence_are_refused(benches):
    model = build(benches("Llama").source, dtype=torch.float32)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type 'dynamic' take positions by the longest sequence"):
        check_architecture(model)


def test_logits_that_forward_changes_in_another_way_are_refused(benches):
    model = build(benches("Cohere").source, dtype=torch.float32)
    check_architecture(model)
    model.forward = lambda **kwargs: model.model(**kwargs).own_states  # which other models' layers do not give
    with pytest.raises(ModelError, match="makes logits of its hidden states in a way of its own"):
        check_architecture(model)
    del model.forward
    model.logit_scale = 0.5  # `forward` reads this, and the config says 0.25
    with pytest.raises(ModelError, match="CohereForCausalLM makes logits of its hidden states in a way of its own"):
        check_architecture(model)


def test_an_attention_that_asks_for_more_is_refused(benches):
    model = build(benches("Llama").source, dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, indices=torch.zeros(1))
    with pytest.raises(ModelError, match="models of type llama ask attention for 'indices'"):
        check_architecture(model)
    attention.forward = forward
    attention.is_causal = False
    with pytest.raises(ModelError, match="have attention that is not causal"):
        check_architecture(model)


def test_an_adapter_that_a_mamba_kernel_would_not_see_is_refused(benches):
    model = build(benches("Granite 4").source, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"Mamba's kernels take the weight of .*mamba\.out_proj as it is"):
        lora.inject(model, LoraConfig(rank=2, target_modules=["out_proj"]), dtype=torch.float32)


def test_a_layer_with_a_state_needs_to_know_where_sequences_begin(benches):
    model = load_model(benches("Qwen3.5 (text)").source, dtype=torch.float32)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="would begin with the state of another"):
        model.base_model(input_ids=ids, use_cache=False)
    model.set_attn_implementation("eager")  # as transformers has it: each row is a sequence
    model.base_model(input_ids=ids, use_cache=False)


def test_linear_attention_beside_experts_in_qwen3_5(tmp_path, monkeypatch):
    dense, mixture = ARCHITECTURES["Qwen3.5 (text)"], ARCHITECTURES["Qwen3-Next"]
    row = replace(dense, config="Qwen3_5MoeTextConfig", own=mixture.own)
    monkeypatch.setitem(ARCHITECTURES, "Qwen3.5-MoE (text)", row)
    assert check(Bench("Qwen3.5-MoE (text)", tmp_path), "packed", None) == {"result": "right"}


def test_most_architectures_have_every_cell_right():
    whole = [name for name, r in TABLE.items() if all(cell["result"] == "right" for cell in r["cells"].values())]
    assert len(TABLE) >= 20
    assert len(whole) >= 14
