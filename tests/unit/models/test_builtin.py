import math
import os
import platform
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.core.errors import ModelError
from posttrain.models.builtin import builtin_config, builtin_tokenizer, create_builtin
from posttrain.prep.datasets.arith import Arith
from posttrain.prep.datasets.gsm8k import Gsm8k
from posttrain.tools.formats import PARSERS

TOKENIZER = builtin_tokenizer("builtin:tiny")


def ids(messages, **kwargs):
    return TOKENIZER.apply_chat_template(messages, return_dict=False, **kwargs)


def example():
    dataset = Arith()
    return dataset.to_sft(next(dataset.rows("train", None, n=1)), 0, "train")


@settings(max_examples=300)
@given(st.text())
def test_any_text_decodes_to_itself(text):
    # NFC as in Qwen2's tokenizer, which transformers puts back whenever it loads a model of type qwen2.
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == unicodedata.normalize("NFC", text)


@given(st.integers(0, 10**12))
def test_each_digit_is_a_token(number):
    assert len(TOKENIZER(str(number))["input_ids"]) == len(str(number))


def test_vocabulary_and_special_tokens():
    assert len(TOKENIZER) == 1024
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for mark in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"):
        assert len(TOKENIZER(mark)["input_ids"]) == 1
        assert TOKENIZER.decode(TOKENIZER(mark)["input_ids"], skip_special_tokens=True) == mark
    assert TOKENIZER.decode(TOKENIZER("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"


def test_token_counts():
    dataset = Arith()
    rows = list(dataset.rows("train", None, n=300))
    whole = [dataset.to_sft(row, i, "train") for i, row in enumerate(rows)]
    lengths = [len(ids(c.messages, tools=c.tools)) for c in whole]
    assert sum(lengths) / len(lengths) < 125
    assert max(lengths) < 140
    words = {word for row in rows for word in row["question"].replace("?", "").replace(".", "").split()[1:]}
    split = {w for w in words if w.isalpha() and len(TOKENIZER(" " + w)["input_ids"]) > 1}
    assert len(split) <= 3, split


def test_gsm8k_text_is_not_spelled_out(test_data):
    rows = list(Gsm8k().rows("test", str(test_data / "gsm8k"), n=300))
    characters = sum(len(row["question"]) for row in rows)
    assert characters / sum(len(TOKENIZER(row["question"])["input_ids"]) for row in rows) > 2.0


def test_rendered_conversation():
    conversation = Arith().to_sft({"question": "How many?", "answer": "3+5=<<3+5=8>>8.\n#### 8"}, 0, "train")
    assert TOKENIZER.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False) == (
        '<|im_start|>system\n<tools>\n{"name": "calc_gsm8k_reward", "parameters": ["answer"]}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHow many?<|im_end|>\n"
        "<|im_start|>assistant\n3+5=8.\n<tool_call>\n"
        '{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nanswer=8 reward=1.0\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 8<|im_end|>\n"
    )


def test_variants_of_the_template():
    user, system = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}
    render = lambda messages, **kw: TOKENIZER.apply_chat_template(messages, tokenize=False, **kw)  # noqa: E731
    assert render([user]) == "<|im_start|>user\nu<|im_end|>\n"
    assert render([system, user]).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user")
    tools = example().tools
    assert render([system, user], tools=tools).startswith('<|im_start|>system\ns\n<tools>\n{"name"')
    calls = [{"type": "function", "function": {"name": n, "arguments": {"x": "é"}}} for n in ("f", "g")]
    tool = {"role": "tool", "content": "t"}
    text = render([user, {"role": "assistant", "content": "", "tool_calls": calls}, tool, tool])
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nt\n</tool_response>\n<tool_response>\nt\n</tool_response><|im_end|>\n"
    )


def test_the_generation_marks_hold_what_the_model_samples():
    conversation = example()
    out = TOKENIZER.apply_chat_template(
        conversation.messages, tools=conversation.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = out["input_ids"], out["assistant_masks"]
    for turn in (2, 4) if len(conversation.messages) == 5 else (1, 3):
        before = ids(conversation.messages[:turn], tools=conversation.tools, add_generation_prompt=True)
        upto = ids(conversation.messages[: turn + 1], tools=conversation.tools)
        assert tokens[: len(before)] == before
        assert tokens[: len(upto)] == upto
        assert mask[len(before) - 1] == 0
        assert mask[len(upto) - 1] == 0
        assert set(mask[len(before) : len(upto) - 1]) == {1}
        assert tokens[len(upto) - 2] == TOKENIZER.eos_token_id
    sampled = TOKENIZER.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    call, closing = (m for m in conversation.messages if m["role"] == "assistant")
    first, second = sampled.split("<|im_end|>")[:2]
    assert second == closing["content"]
    parsed = PARSERS.get("hermes").parse(first)
    assert parsed.content == call["content"]
    assert parsed.calls[0].arguments == call["tool_calls"][0]["function"]["arguments"]


def test_config():
    config = builtin_config("tiny")
    assert config.vocab_size % 64 == 0
    assert config.vocab_size >= len(TOKENIZER)
    assert config.tie_word_embeddings
    assert config.eos_token_id == TOKENIZER.eos_token_id
    assert config.pad_token_id == TOKENIZER.pad_token_id


def test_the_seed_decides_the_weights_and_the_global_rng_is_untouched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = create_builtin("builtin:tiny", 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    same, other = create_builtin("tiny", 0).state_dict(), create_builtin("tiny", 1).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in first.state_dict().items())
    assert not torch.equal(same["lm_head.weight"], other["lm_head.weight"])
    assert {p.dtype for p in first.parameters()} == {torch.float32}


def test_an_untrained_model_knows_nothing():
    conversation = example()
    tokens = torch.tensor([ids(conversation.messages, tools=conversation.tools)])
    with torch.no_grad():
        loss = create_builtin("tiny", 0)(input_ids=tokens, labels=tokens).loss.item()
    assert abs(loss - math.log(1024)) < 0.2


def test_a_saved_folder_loads_with_plain_transformers(tmp_path):
    model = create_builtin("tiny", 3)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    conversation = example()
    tokens = ids(conversation.messages, tools=conversation.tools)
    again = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, return_dict=False)
    assert again == tokens
    for text in ("e\u0301 \u00bd", "<tool_call>\n\n x", " 12,5\r\n\t"):
        assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor([tokens])).logits, model(torch.tensor([tokens])).logits)


def test_unknown_name():
    with pytest.raises(ModelError, match="tinny") as error:
        builtin_tokenizer("builtin:tinny")
    assert "builtin:tiny" in (error.value.hint or "")


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="it learns from Python 3.11.7's standard library")
def test_the_shipped_tokenizer_is_what_the_script_makes():
    repo = Path(__file__).resolve().parents[3]
    command = [sys.executable, str(repo / "scripts" / "make_tiny_tokenizer.py"), "--check"]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
