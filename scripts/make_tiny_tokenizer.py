#!/usr/bin/env python
"""Make the tokenizer of ``builtin:tiny``: byte-level BPE with Qwen2's pre-tokenizer and a vocabulary of 1024.

It learns from generated arith problems, their multi-turn form with tool calls, and, for general English, from the
docstrings and help topics of Python's standard library. The standard library's text changes between Python versions,
so the shipped files were made with the version stated in ``PYTHON``.

    python scripts/make_tiny_tokenizer.py            # writes posttrain/models/tiny/
    python scripts/make_tiny_tokenizer.py --check    # exit code 1 if the shipped files would change
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from posttrain.core.types import Message
from posttrain.prep.datasets.arith import Arith, ArithSpec

PYTHON = "3.11.7"
VOCAB = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ARITH_ROWS = 4000
# Every wording and larger numbers than the data set's default, so that its difficulty can change without new merges.
SPEC = ArithSpec(max_operand=20, max_result=400, steps=(1, 2))
PROSE = re.compile(r"[A-Za-z ,.';?!-]{20,}")
OUT = Path(__file__).resolve().parent.parent / "posttrain" / "models" / "tiny"


def arith_text() -> Iterator[str]:
    """Every message of the multi-turn form, and each row's calls and schema as the chat template writes them."""
    dataset = Arith(SPEC, hasty_share=0.0)
    for index, row in enumerate(dataset.rows("train", None, n=ARITH_ROWS)):
        conversation = dataset.to_sft(row, index, "train")
        for message in conversation.messages:
            yield _as_text(message)
        for tool in conversation.tools:
            function = tool["function"]
            yield json.dumps({"name": function["name"], "parameters": list(function["parameters"]["properties"])})
        yield "system\n"
        yield row["answer"]


def _as_text(message: Message) -> str:
    calls = [
        "\n\n" + json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}) + "\n\n"
        for call in message.get("tool_calls", [])
    ]
    return f"{message['role']}\n{message.get('content', '')}" + "".join(calls)


def general_text() -> Iterator[str]:
    """English sentences of the standard library's help topics and docstrings, those with code in them left out."""
    from pydoc_data.topics import topics

    for text in (*(topics[name] for name in sorted(topics)), *_docstrings()):
        for sentence in re.split(r"(?<=[.?!:])\s+", " ".join(text.split())):
            if PROSE.fullmatch(sentence):
                yield sentence


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            print(f"skipped {path.name}: {error}", file=sys.stderr)
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # as Qwen2: transformers puts it back for any model of type qwen2
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*arith_text(), *general_text()], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    return tokenizer


def files(tokenizer: Tokenizer) -> dict[str, str]:
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped files; write nothing")
    args = parser.parse_args()
    if platform.python_version() != PYTHON:
        print(f"warning: the shipped files were made with Python {PYTHON}", file=sys.stderr)
    changed = False
    for name, text in files(train()).items():
        path = OUT / name
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        print(f"{'same' if same else 'changed'}: {path}")
        changed |= not same
        if not args.check and not same:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    return int(changed and args.check)


if __name__ == "__main__":
    sys.exit(main())
