"""A reward model of the tiny kind: small, random, saved as its authors would save it, and loaded from there."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2ForSequenceClassification,
)

from posttrain.core.errors import ConfigError, ModelError
from posttrain.models.builtin import builtin_config, builtin_tokenizer, create_builtin
from posttrain.models.reward import RewardModel, open_reward_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = builtin_tokenizer("tiny")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
ENDS_IN_EOS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
"""A template whose conversations end with the end-of-sequence token, as Llama's do."""

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}


def talk(words, question="What is 2 + 2?"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": " ".join(["four"] * words)}]


TALKS = [talk(n) for n in (3, 40, 1, 17, 90, 2, 40, 8)]
WITH_TOOLS = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "train": False},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def tokens(conversation, tokenizer=TOKENIZER):
    return torch.tensor([tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)])


def save(folder, pad_token_id=PAD, template=None, kind="qwen2", **config_values):
    """A reward model whose scores differ by more than rounding, and its tokenizer."""
    torch.manual_seed(7)
    if kind == "qwen2":
        config = builtin_config("tiny")
        config.update({"num_labels": 1, **config_values})
        config.pad_token_id = pad_token_id
        model = Qwen2ForSequenceClassification(config)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        of_kind, build = {
            "llama": (LlamaConfig, LlamaForSequenceClassification),
            "bert": (BertConfig, BertForSequenceClassification),
        }[kind]
        vocab = builtin_config("tiny").vocab_size
        model = build(of_kind(vocab_size=vocab, num_labels=1, pad_token_id=pad_token_id, **sizes, **config_values))
    for parameter in model.parameters():  # fresh weights are so small that every conversation scores alike
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def load(folder, max_length=512, tokens_per_batch=2048, dtype=torch.float32):
    return RewardModel(str(folder), "cpu", dtype, max_length=max_length, tokens_per_batch=tokens_per_batch)


def numbers(scores):
    assert [s.error for s in scores] == [None] * len(scores)
    return torch.tensor([s.score for s in scores])


def by_hand(folder, conversation, ids=None):
    """The head's number at the last token, from the base model's hidden states: one conversation, nothing padded."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=tokens(conversation) if ids is None else ids).last_hidden_state
        return (hidden[0, -1] @ model.score.weight[0]).item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def test_scores_are_those_of_a_forward_by_hand(folder, model):
    scores = numbers(model.score([*TALKS, WITH_TOOLS]))
    expected = torch.tensor([by_hand(folder, c) for c in [*TALKS, WITH_TOOLS]])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert len({round(x, 3) for x in expected.tolist()}) == len(expected) - 1  # one conversation is there twice


# BERT reads its first token, whatever pads.
@pytest.mark.parametrize(
    ("kind", "pad_token_id"),
    [("bert", PAD), *((kind, pad) for kind in ("qwen2", "llama") for pad in (PAD, None, EOS, -1))],
)
def test_batching_changes_no_score(tmp_path, kind, pad_token_id):
    folder = save(tmp_path, pad_token_id, ENDS_IN_EOS, kind)
    model = load(folder)
    alone = torch.cat([numbers(model.score([t])) for t in TALKS])
    for budget in (512, 700, 10**6):
        model.tokens_per_batch = budget
        torch.testing.assert_close(numbers(model.score(TALKS)), alone, rtol=0, atol=1e-5)
    assert alone.std() > 1e-2


@pytest.mark.parametrize("pad_token_id", [None, -1])
def test_without_a_pad_token_the_very_last_token_is_read(tmp_path, pad_token_id):
    """The trap: conversations end with the token that the tokenizer would pad with, which the library then skips."""
    folder = save(tmp_path, pad_token_id, ENDS_IN_EOS)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": TOKENIZER.eos_token})
    )
    model = load(folder)
    assert model.tokenizer.pad_token_id == EOS
    scores = numbers(model.score(TALKS))
    ids = [tokens(t, model.tokenizer) for t in TALKS]
    assert all(i[0, -1] == EOS for i in ids)
    expected = torch.tensor([by_hand(folder, t, i) for t, i in zip(TALKS, ids, strict=True)])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    one_before = torch.tensor([by_hand(folder, t, i[:, :-1]) for t, i in zip(TALKS, ids, strict=True)])
    assert (scores - one_before).abs().min() > 1e-3


def test_any_token_may_end_a_conversation(tmp_path):
    """Without a declared pad token the id that pads is one that no conversation of the batch ends with."""
    model = load(save(tmp_path, None, "{{ messages[0].content }}"))
    conversations = [[{"role": "user", "content": "four " * (i % 7) + TOKENIZER.decode([i])}] for i in range(40)]
    ends = {tokens(c, model.tokenizer)[0, -1].item() for c in conversations}
    assert {0, 2, 3, 4, 5} <= ends  # what a fixed choice may well be
    alone = torch.cat([numbers(model.score([c])) for c in conversations])
    torch.testing.assert_close(numbers(model.score(conversations)), alone, rtol=0, atol=1e-5)
    assert model.model.config.pad_token_id not in ends


def test_a_declared_pad_token_is_read_over_as_the_model_does_it_alone(tmp_path):
    folder = save(tmp_path, EOS, ENDS_IN_EOS)
    model = load(folder)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([reference(input_ids=tokens(t, model.tokenizer)).logits[:, 0] for t in TALKS])
    torch.testing.assert_close(numbers(model.score(TALKS)), expected, rtol=0, atol=1e-5)


def test_batches_keep_to_the_budget(folder, monkeypatch):
    model = load(folder, max_length=300, tokens_per_batch=300)
    shapes = []
    forward = model.model.forward

    def watched(input_ids, attention_mask):
        shapes.append(tuple(input_ids.shape))
        assert not torch.is_grad_enabled()
        return forward(input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(model.model, "forward", watched)
    model.score(TALKS)
    assert not model.model.training
    assert max(b * length for b, length in shapes) <= 300
    assert sum(b for b, _ in shapes) == len(TALKS)
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert len(shapes) < len(TALKS)
    # Of two neighbours, the second's longest row did not fit into the first.
    assert all((b + 1) * length > 300 for b, length in shapes[:-1])


def test_a_conversation_that_is_too_long_is_its_own_error(model):
    long = len(tokens(talk(600))[0])
    scores = model.score([talk(3), talk(600), talk(5)])
    assert [s.error is None for s in scores] == [True, False, True]
    assert scores[1].error == f"the conversation has {long} tokens, reward.model.max_length is 512"
    exact = tokens(talk(40)).shape[1]
    fitting, short = load_limited(model, exact), load_limited(model, exact - 1)
    assert fitting.score([talk(40)])[0].error is None
    assert short.score([talk(40)])[0].error is not None


def load_limited(model, max_length):
    return load(model.model.config._name_or_path, max_length=max_length)


def test_no_more_tokens_than_the_model_has_positions(tmp_path):
    folder = save(tmp_path, max_position_embeddings=32)
    scores = load(folder).score([talk(1), talk(60)])
    assert scores[0].error is None
    assert scores[1].error.endswith("tokens, and the model 32 positions")


def test_a_conversation_that_the_template_refuses_is_its_own_error(tmp_path):
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + ENDS_IN_EOS
    model = load(save(tmp_path, template=picky))
    broken = [{"role": "user", "content": {"not": "text"}}]
    scores = model.score([talk(2), WITH_TOOLS, [], talk(3), broken])
    assert [s.error is None for s in scores] == [True, False, False, True, True]
    assert "chat template refuses the conversation" in scores[1].error
    assert "no system message" in scores[1].error
    # The same scores without the bad ones.
    assert numbers([scores[0], scores[3]]).tolist() == pytest.approx(numbers(model.score([talk(2), talk(3)])).tolist())


def test_half_of_a_surrogate_pair_is_a_question_mark_as_for_the_policy(model):
    """A tool's JSON can bring one."""
    half, mark = model.score([[{"role": "user", "content": f"What is {text}?"}] for text in ("\ud800", "?")])
    assert (half.error, half.score) == (None, mark.score)


def test_a_conversation_without_tokens(tmp_path):
    model = load(save(tmp_path, template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    (score,) = model.score([[{"role": "user", "content": ""}]])
    assert score.error == "the conversation has no tokens"


def test_nothing_to_score(model):
    assert model.score([]) == []


def test_a_number_that_is_none_is_an_error(folder):
    model = load(folder)
    model.model.get_input_embeddings().weight[TOKENIZER("zebra")["input_ids"][-1]] = float("nan")
    zebra = [{"role": "user", "content": "zebra"}]
    scores = model.score([talk(2), zebra])
    assert scores[0].error is None
    assert scores[1].error == "the reward model gave nan"


def test_weights_that_are_not_finite_are_refused(folder, tmp_path):
    copy = tmp_path / "nan"
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 3] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"are not finite: model\.embed_tokens\.weight"):
        load(copy)


def test_correct_is_never_claimed(model):
    assert [s.correct for s in model.score(TALKS)] == [False] * len(TALKS)


def test_the_conversation_of_the_train_flag_is_the_same(model):
    flagged = [{**m, "train": False} if m["role"] == "assistant" else m for m in talk(5)]
    assert model.score([flagged]) == model.score([talk(5)])


def test_scores_in_bfloat16_keep_the_digits_of_the_head(folder):
    """The head's product in float32: without it every score is a bfloat16 number."""
    scores = numbers(load(folder, dtype=torch.bfloat16).score(TALKS))
    assert (scores != scores.bfloat16().float()).any()
    torch.testing.assert_close(scores, numbers(load(folder).score(TALKS)), rtol=0.1, atol=0.1)


# ---------------------------------------------------------------------- models that are none


def test_a_folder_that_is_not_there():
    with pytest.raises(ModelError, match="model folder not found"):
        open_reward_model("/no/such/folder")


@pytest.mark.parametrize("path", ["builtin:tiny", "a checkpoint of ours"])
def test_a_model_of_ours_is_no_reward_model(path, tmp_path):
    if not path.startswith("builtin"):
        (tmp_path / "actor" / "model").mkdir(parents=True)
        (tmp_path / "actor" / "huggingface").mkdir()
        builtin_config("tiny").save_pretrained(tmp_path / "actor" / "huggingface")
        path = str(tmp_path)
    with pytest.raises(ModelError, match="is no reward model but a language model"):
        open_reward_model(path)


def test_a_language_model_is_refused(tmp_path):
    create_builtin("tiny", 0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no reward model: Qwen2ForCausalLM with 2 labels") as error:
        open_reward_model(str(tmp_path))
    assert "num_labels = 1" in error.value.hint


def test_a_head_without_weights_is_refused(tmp_path):
    """The library would fill it at random, and say so in a log."""
    create_builtin("tiny", 0).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "LABEL_0"}}))
    with pytest.raises(ModelError, match=r"has no weights for score\.weight"):
        open_reward_model(str(tmp_path))


def test_a_folder_without_weights_is_refused(folder, tmp_path):
    copy = tmp_path / "empty"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors in") as error:
        load(copy)
    assert "complete" in error.value.hint


def test_weights_of_another_size_are_refused(folder, tmp_path):
    copy = tmp_path / "other"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"down_proj\.weight is \(.*\), and the config makes it"):
        open_reward_model(str(copy))


def test_no_chat_template(folder, tmp_path):
    copy = tmp_path / "plain"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template") as error:
        load(copy)
    assert "chat_template.jinja" in error.value.hint


def test_a_batch_too_small_for_one_conversation(folder):
    with pytest.raises(ConfigError, match="tokens_per_batch = 100 has no room"):
        load(folder, max_length=101, tokens_per_batch=100)
