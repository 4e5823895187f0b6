"""A chat template, plain and traced: which characters of a rendered conversation come from which message.

A template is a program; what it writes for a message cannot be found by searching its output. So its syntax tree is
instrumented: each round of a loop over the messages, and each ``{% generation %}`` block, puts a marker into the output
that no message holds. Without its markers the output must be the plain rendering, character for character, or the
conversation is refused. That takes two renderings for a conversation of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.visitor import NodeTransformer

from posttrain.core.errors import DataError
from posttrain.core.types import ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""[start, end) characters."""

_MARK = "__posttrain_mark__"
_GENERATION = -1
"""Stands for a ``{% generation %}`` block where loops have their number."""
_FENCES = range(0xF0000, 0xFFFFD)
"""Private-use characters (Unicode plane 15), of which one that the conversation lacks encloses each marker."""
RAISED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises that meets a conversation it was not written for."""


@dataclass(frozen=True)
class Traced:
    """A rendered conversation and where its parts come from."""

    text: str
    regions: dict[int, list[Span]]
    """For each message that the template loops over, by its index: what was written in its round. Runs of white space
    alone are left out."""
    generated: list[tuple[int | None, Span]]
    """(message, characters) of each ``{% generation %}`` block, in order; no message: the block is outside the loop."""


class ChatTemplate:
    """The chat template of a tokenizer with its keyword arguments (such as ``enable_thinking``) filled in.

    Messages are plain dicts as ``data.messages.normalize_messages`` makes them; ``train`` is ours and never shown to
    the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(template_kwargs)

    def source(self, tools: Sequence[ToolSchema] | None = None) -> str:
        """Return the template itself; some tokenizers have another one for conversations with tools."""
        return str(self.tokenizer.get_chat_template(None, list(tools) if tools else None))

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as text. Raises ``DataError`` where the template refuses it."""
        self._check_parts(messages)
        return self._plain(self._shown(messages, tools), tools, add_generation_prompt)

    def traced(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None = None) -> Traced:
        """Return the conversation as text, with the origin of its parts.

        Raises:
            DataError: the template refuses the conversation, or looks into its own output, so that it cannot be traced.
        """
        self._check_parts(messages)
        shown = self._shown(messages, tools)
        text = self._plain(shown, tools, False)
        fence = next(char for char in map(chr, _FENCES) if char not in text)
        pieces = self._marked(shown, tools, fence).split(fence)
        if "".join(pieces[::2]) != text:
            raise DataError(
                "the chat template reads back what it has written, so that its messages cannot be told apart",
                hint="put {% generation %} marks into the template, around what the assistant writes",
            )
        return _assemble(text, pieces)

    def _shown(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None) -> list[dict[str, Any]]:
        """Return messages as the template takes them: without what is ours, and in parts where it shows only these."""
        shown = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        source = self.source(tools)
        if ".thinking" in source:  # gpt-oss reads thoughts under this name, and refuses them beside words and calls
            for message in shown:
                if (thoughts := message.get("reasoning_content")) and not (
                    message.get("content") and message.get("tool_calls")
                ):
                    message["thinking"] = thoughts
        if shows_parts_alone(source):
            for message in shown:
                if isinstance(text := message.get("content"), str):
                    message["content"] = [{"type": "text", "text": text}]
        return shown

    def _plain(
        self, messages: list[dict[str, Any]], tools: Sequence[ToolSchema] | None, add_generation_prompt: bool
    ) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.kwargs,
            )
        except RAISED as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        return str(rendered)

    def _marked(self, messages: list[dict[str, Any]], tools: Sequence[ToolSchema] | None, fence: str) -> str:
        listed = list(tools) if tools else None
        # The same variables as in apply_chat_template; `messages` are told apart by identity.
        variables = {**self.tokenizer.special_tokens_map, **self.kwargs}
        variables |= {"messages": messages, "tools": listed, "documents": None, "add_generation_prompt": False}
        try:
            return instrument(self.source(tools)).render({**variables, _MARK: _marker(messages, fence)})
        except RAISED as error:
            raise DataError(f"the chat template cannot be traced: {error}") from error

    def _check_parts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise for a template that shows nothing of a message that is a list of parts: many do not say so."""
        if all(isinstance(message.get("content"), str) for message in messages):
            return
        part = {"type": "text", "text": "(text)"}
        try:
            shown = [
                self._plain([{"role": "user", "content": c}], None, False) for c in ([part], [{"type": "image"}, part])
            ]
        except DataError:
            shown = ["", ""]
        if part["text"] not in shown[0] or shown[0] == shown[1]:
            raise DataError("the chat template cannot show images", hint="use the template of a vision-language model")


def hidden_tools(text: str, tools: Sequence[ToolSchema], messages: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return the names of tools that a rendered conversation does not show, or not more often than its ``messages``
    have them."""
    names = [str(tool["function"]["name"]) for tool in tools]
    said = "\n".join(str(value) for message in messages for value in message.values())
    return [name for name in names if text.count(name) <= said.count(name)]


@lru_cache(maxsize=32)
def shows_parts_alone(source: str) -> bool:
    """Return true for a chat template that shows a message's text only as a part of a list, as SmolVLM's does: a plain
    text it goes through letter by letter, and shows nothing."""
    text = "(text)"
    try:
        environment, tree = parse(source)
        template = environment.from_string(tree)
    except RAISED:  # rendering a conversation says what is wrong
        return False

    def shows(content: Any) -> bool:
        try:
            rendered: str = template.render(
                messages=[{"role": "user", "content": content}], add_generation_prompt=False
            )
        except RAISED:  # it needs something that a real conversation has: then that decides
            return True
        return text in rendered

    return not shows(text) and shows([{"type": "text", "text": text}])


# ---------------------------------------------------------------------- markers in


@lru_cache(maxsize=32)
def instrument(source: str) -> Template:
    """Return a chat template that calls ``_MARK`` at the start of each round of each loop, after each loop, and around
    each ``{% generation %}`` block, and writes what it returns."""
    environment, tree = parse(source)
    tree = _Instrument().visit(tree)
    tree.set_environment(environment)
    compiled: Template = environment.from_string(tree)
    return compiled


def parse(source: str) -> tuple[Environment, nodes.Template]:
    """Return the environment in which transformers renders chat templates, and a template's syntax tree."""
    # Private, but the only way to that environment: its filters, its whitespace rules, its sandbox. That it is still
    # the same one is proven by comparisons with what transformers renders.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Environment = _compile_jinja_template(source).environment
    return environment, environment.parse(source)


class _Instrument(NodeTransformer):
    def __init__(self) -> None:
        self.loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        loop, self.loops = self.loops, self.loops + 1
        self.generic_visit(node)
        targets = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
        names = {target.name for target in targets if isinstance(target, nodes.Name)}
        body: list[nodes.Node] = [_mark(node, loop, nodes.Name(name, "load")) for name in sorted(names)]
        for statement in node.body:
            body.append(statement)
            # In a loop over numbers the message comes by `set message = messages[i]`.
            if (item := _set_by_index(statement, names)) is not None:
                body.append(_mark(node, loop, nodes.Name(item, "load")))
        node.body = body
        return [node, _mark(node, loop)]

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        if is_generation(node):
            node.body = [_mark(node, _GENERATION, nodes.Const(True)), *node.body, _mark(node, _GENERATION)]
        return node


def is_generation(block: nodes.CallBlock) -> bool:
    """Return true if it is ``{% generation %}``."""
    called = block.call.node
    return isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation_support"


def _set_by_index(statement: nodes.Node, names: set[str]) -> str | None:
    """Return ``x`` of ``set x = anything[i]``, for an ``i`` of these names."""
    if not isinstance(statement, nodes.Assign) or not isinstance(statement.target, nodes.Name):
        return None
    value = statement.node
    indexed = isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Name) and value.arg.name in names
    return statement.target.name if indexed else None


def _mark(near: nodes.Node, number: int, *item: nodes.Expr) -> nodes.Node:
    call = nodes.Call(nodes.Name(_MARK, "load"), [nodes.Const(number), *item], [], None, None)
    return nodes.Output([call]).set_lineno(near.lineno)


def _marker(messages: list[dict[str, Any]], fence: str) -> Any:
    """Return the function behind ``_MARK``. A loop over anything but messages writes nothing."""
    index = {id(message): i for i, message in enumerate(messages)}
    running: set[int] = set()

    def mark(number: int, *item: Any) -> str:
        if number == _GENERATION:
            return f"{fence}{number}:{'open' if item else ''}{fence}"
        if item and (i := index.get(id(item[0]))) is not None:
            running.add(number)
            return f"{fence}{number}:{i}{fence}"
        if number in running:  # the loop has ended, or goes on with something that the template made itself
            running.remove(number)
            return f"{fence}{number}:{fence}"
        return ""

    return mark


# ---------------------------------------------------------------------- markers out


def _assemble(text: str, pieces: Sequence[str]) -> Traced:
    """Return text and markers in turn, as spans of ``text``. A piece of text belongs to the innermost loop that
    runs."""
    regions: dict[int, list[Span]] = {}
    generated: list[tuple[int | None, Span]] = []
    rounds: list[tuple[int, int]] = []  # (loop, message) of the loops that run, outermost first
    block: tuple[int | None, int] | None = None
    at = 0
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            if piece and rounds:
                extend(regions.setdefault(rounds[-1][1], []), (at, at + len(piece)))
            at += len(piece)
            continue
        number, _, argument = piece.partition(":")
        if int(number) != _GENERATION:
            outer = next((k for k, (loop, _) in enumerate(rounds) if loop == int(number)), len(rounds))
            rounds[outer:] = [(int(number), int(argument))] if argument else []
        elif argument:
            block = (rounds[-1][1] if rounds else None, at)
        elif block is not None:
            generated.append((block[0], (block[1], at)))
            block = None
    for message, spans in regions.items():
        regions[message] = [span for span in spans if not text[slice(*span)].isspace()]
    return Traced(text, regions, generated)


def extend(spans: list[Span], more: Span) -> None:
    """Add a span; two that touch become one."""
    if spans and spans[-1][1] == more[0]:
        more = (spans.pop()[0], more[1])
    spans.append(more)
