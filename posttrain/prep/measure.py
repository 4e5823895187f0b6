"""What a card says about the rows of a file: how long they are, and how often one comes twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.errors import DataError, ModelError
from posttrain.core.types import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)

# Operators stay: without them, "1 + 2" and "1 - 2" would be one text.
_DROPPED_ASCII = b" \t\r\n\v\f!\"#$%&'(),.:;?@[\\]_`{|}~"
_DROPPED = str.maketrans("", "", "\u00a0\u3000。，、；：？！（）“”‘’…")


def question(messages: Sequence[Message], images: Sequence[Mapping[str, Any]] = ()) -> str:
    """What a conversation asks: the user's messages before the first of the assistant's, and a word for each image, so
    that the same words about another image are another question."""
    asked = []
    for message in messages:
        if message["role"] == "assistant":
            break
        if message["role"] == "user":
            asked.append(message.get("content", ""))
    for image in images:
        asked.append("image" + hashlib.sha256(image.get("bytes") or str(image.get("path")).encode()).hexdigest()[:16])
    return "\n".join(asked)


def full_text(messages: Sequence[Message]) -> str:
    """All that stands in a conversation."""
    parts = []
    for message in messages:
        parts.append(message.get("content", ""))
        parts.append(message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            parts.append(f"{call['function']['name']} {call['function']['arguments']}")
    return "\n".join(parts)


def normalised(text: str) -> bytes:
    """A text without case, white space and punctuation, in UTF-8; operators stay."""
    text = text.lower() if text.isascii() else text.lower().translate(_DROPPED)
    return text.encode().translate(None, _DROPPED_ASCII)


def duplicates(questions: Sequence[str], texts: Sequence[str]) -> tuple[int, list[tuple[int, int]]]:
    """How many texts an earlier one says already.

    Args:
        questions: what each text answers; where it differs, the row does, and the text need not be looked at.
        texts: the whole texts.

    Returns:
        The number of exact duplicates, and (row, earlier row) of each that is one after ``normalised``.
    """
    keys = [normalised(question) for question in questions]
    often = {key for key, count in Counter(keys).items() if count > 1}
    alike = [row for row, key in enumerate(keys) if key in often]
    first: dict[tuple[bytes, bytes], int] = {}
    pairs = [(row, first.setdefault((keys[row], normalised(texts[row])), row)) for row in alike]
    exact = len(alike) - len({(questions[row], texts[row]) for row in alike})
    return exact, [(row, earlier) for row, earlier in pairs if row != earlier]


def percentiles(values: Sequence[int]) -> dict[str, float]:
    """``mean`` and the percentiles ``p0`` ... ``p100`` of at least one value (nearest rank, so each is one of them)."""
    ranks = np.percentile(np.asarray(values), PERCENTILES, method="inverted_cdf")
    return {"mean": round(float(np.mean(values)), 1)} | {
        f"p{p}": float(rank) for p, rank in zip(PERCENTILES, ranks, strict=True)
    }


class ChatLengths:
    """How long conversations are after a chat template: in tokens, or without a tokenizer in characters."""

    def __init__(self, template: str | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Use ``template``, None: the tokenizer's own. One of the two must be there."""
        self.unit = "characters" if tokenizer is None else "tokens"
        self._tokenizer, self._template = tokenizer, template
        if tokenizer is not None and template is not None:
            tokenizer.chat_template = template

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        """Length of a prompt, up to where the assistant writes. Raises ``DataError`` where the template refuses it."""
        if self._tokenizer is None:
            return len(self._text(messages, tools, True))
        from posttrain.data.chat import render_prompt

        return len(render_prompt(messages, self._tokenizer, tools or None))

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        """Length of a conversation. Raises ``DataError`` where the template refuses it, or hides its loss mask."""
        if self._tokenizer is None:
            return len(self._text(messages, tools, False))
        from posttrain.data.chat import render_chat

        return len(render_chat(messages, self._tokenizer, tools or None).ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        from posttrain.data.template import RAISED

        try:
            rendered: Any = render_jinja_template(
                [[{key: value for key, value in m.items() if key != "train"} for m in messages]],
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
            )
        except RAISED as error:
            hint = "use another one; or does it need what --tokenizer MODEL has, such as bos_token?"
            raise DataError(f"the chat template refuses the conversation: {error}", hint=hint) from error
        return str(rendered[0][0])


def open_chat_lengths(template: str | None, tokenizer: str | None) -> ChatLengths | None:
    """What ``--template`` and ``--tokenizer`` ask for; None if neither is given.

    Args:
        template: a ``.jinja`` file, a ``tokenizer_config.json``, one of the tokenizer's own named templates, or a model
            (folder, hub id, ``builtin:tiny``), whose tokenizer is then used as well unless another is given.
        tokenizer: a model, or a folder with a tokenizer.

    Raises:
        DataError: the template cannot be read.
        ModelError: there is no such model, or it has no chat template.
    """
    if template is None and tokenizer is None:
        return None
    loaded = None if tokenizer is None else _tokenizer(tokenizer, "--tokenizer")
    if template is None:
        return ChatLengths(None, loaded)
    file = Path(template)
    if os.path.isfile(file):
        return ChatLengths(_template_of(file), loaded)
    if loaded is not None and isinstance(loaded.chat_template, dict) and template in loaded.chat_template:
        return ChatLengths(loaded.chat_template[template], loaded)
    if file.suffix in (".jinja", ".json"):
        raise DataError(f"--template {template}: no such file", hint="give a .jinja file, or a model that has one")
    named = _tokenizer(template, "--template")
    return ChatLengths(named.chat_template, loaded or named)


def _template_of(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text).get("chat_template") if file.suffix == ".json" else text
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"--template {file}: unreadable: {error}", hint="it must be UTF-8 text") from error
    if not isinstance(value, str):
        raise DataError(f"--template {file}: has no `chat_template`", hint="give a .jinja file")
    return value


def _tokenizer(path: str, option: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model that ``option`` names. Raises ``ModelError``."""
    from posttrain.models.load import ModelSource, load_tokenizer, locate

    # A folder may hold a tokenizer and no model.
    alone = os.path.isfile(Path(path) / "tokenizer_config.json")
    try:
        return load_tokenizer(ModelSource(path) if alone else locate(path))
    except ModelError as error:
        raise ModelError(f"{option}: {error.message}", hint=error.hint) from error
