"""Fixtures of the unit tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def qwen(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedTokenizerBase]:
    """``qwen(template)``: the real Qwen tokenizer with one of the templates beside it. One tokenizer: the template
    asked for last is the one that all callers have."""
    from transformers import AutoTokenizer

    source = test_data / "tokenizer"
    if not (source / "vocab.json").is_file():
        pytest.skip(f"no Qwen tokenizer in {source}")
    folder = tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(source / name, folder / name)
    shutil.copy(source / "qwen3_tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def with_template(name: str) -> PreTrainedTokenizerBase:
        tokenizer.chat_template = (source / "templates" / f"{name}.jinja").read_text()
        return tokenizer

    return with_template
