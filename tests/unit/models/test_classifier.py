"""A model of values as a sequence classifier: its config, its weights, and what takes one for no language model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, MambaConfig

from posttrain import merge_ckpt
from posttrain.config import Config
from posttrain.core.errors import ConfigError, ModelError
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.classifier import classifier_config, is_classifier
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource, build, load_config, load_tokenizer
from posttrain.models.reward import RewardModel
from posttrain.models.weights import load_weights, materialize
from posttrain.runs.preflight import find_model, open_model
from posttrain.train import checkpoint
from posttrain.train.model import PackedValues
from tests.helpers.saved import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelSource("builtin:tiny")
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]


@pytest.fixture
def trained(tmp_path):
    """A checkpoint as a reward model's run writes it, and the model."""
    lm = PackedValues(build(TINY, dtype=torch.float32))
    materialize(lm, torch.device("cpu"))
    load_weights(lm.model, TINY, 3, leave=frozenset({PackedValues.HEAD}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        lm.model.get_output_embeddings().weight.normal_(generator=generator)
    folder = checkpoint.begin(tmp_path / "r" / "checkpoints", 1)
    save_shards(folder / "actor", lm.model, None, 1)
    save_text_side(TINY, folder / "actor" / "huggingface", reward_model=True)
    return checkpoint.commit(folder, 1, {"meta.json": {"step": 1}}, 1).path, lm


def test_the_merged_folder_is_a_reward_model(trained, tmp_path):
    folder, lm = trained
    out = merge_ckpt.run(str(folder), str(tmp_path / "merged"))
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert (model.config.num_labels, model.config.tie_word_embeddings) == (1, False)
    names = dict(model.named_parameters())
    expected = {("score.weight" if name == PackedValues.HEAD else name): p for name, p in lm.model.named_parameters()}
    assert names.keys() == expected.keys()
    for name, parameter in names.items():
        torch.testing.assert_close(parameter.data, expected[name].data, rtol=0, atol=0)
    (score,) = RewardModel(str(out), "cpu", torch.float32, 128, 512).score([TALK])
    with torch.no_grad():
        ids = builtin_tokenizer("tiny").apply_chat_template(TALK, return_tensors="pt", return_dict=False)
        assert score.score == pytest.approx(model(ids).logits.item(), abs=1e-6)


def test_a_reward_model_is_no_language_model(trained):
    folder, _ = trained
    cfg = Config.model_validate({"command": "sft", "model": {"path": str(folder)}})
    with pytest.raises(ConfigError, match="is a reward model, and not a language model"):
        open_model(cfg)
    assert not is_classifier(load_config(TINY))


def test_a_critic_may_start_from_a_reward_model(trained):
    """From all of it but the head, which begins anew."""
    folder, lm = trained
    source = find_model(Config(command="rl"), str(folder), "critic.path")
    assert is_classifier(load_config(source))
    critic = PackedValues(build(source, dtype=torch.float32))
    materialize(critic, torch.device("cpu"))
    load_weights(critic.model, source, 0, leave=frozenset({PackedValues.HEAD}))
    for name, parameter in critic.model.named_parameters():
        if name != PackedValues.HEAD:
            torch.testing.assert_close(parameter, lm.model.get_parameter(name), rtol=0, atol=0)


def test_padding_is_not_what_ends_a_conversation(tmp_path):
    """Classifiers skip the padding at the end, and the end of a turn with it if the two are one token."""
    tokenizer, config = load_tokenizer(TINY), load_config(TINY)
    assert classifier_config(TINY).pad_token_id == config.pad_token_id != tokenizer.eos_token_id
    config.pad_token_id = tokenizer.eos_token_id
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert classifier_config(ModelSource(str(tmp_path))).pad_token_id is None


def test_a_kind_of_model_without_classifier(tmp_path):
    MambaConfig().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mamba"
    with pytest.raises(ModelError, match="no sequence classifier for models of type mamba"):
        classifier_config(ModelSource(str(tmp_path)))
