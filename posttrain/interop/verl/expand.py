"""What a word of a bash script expands to, as far as that can be known without running anything."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.interop.verl.arithmetic import NotKnown, evaluate

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?$!0-9])(\[(?:[@*]|\d+)\])?(.*)", re.S)
_BLANK = re.compile(r"[ \t\n]+")


@dataclass(frozen=True)
class Unknown:
    """A part of a text that cannot be known."""

    reason: str


@dataclass(frozen=True)
class Text:
    """One word after expansion. Parts that cannot be known stay in their places."""

    parts: tuple[str | Unknown, ...] = ()

    @staticmethod
    def of(text: str) -> Text:
        return Text((text,)) if text else Text()

    @property
    def known(self) -> str | None:
        """The text, None if any part of it is unknown."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def start(self) -> str:
        """What comes before the first unknown part."""
        start = ""
        for part in self.parts:
            if isinstance(part, Unknown):
                break
            start += part
        return start

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys(part.reason for part in self.parts if isinstance(part, Unknown)))

    def __add__(self, other: Text) -> Text:
        return Text(self.parts + other.parts)

    def since(self, length: int) -> Text:
        """Without the first ``length`` characters, which are known."""
        first = self.start
        rest = next((i for i, part in enumerate(self.parts) if isinstance(part, Unknown)), len(self.parts))
        return Text.of(first[length:]) + Text(self.parts[rest:])


@dataclass
class Shell:
    """Variables and arguments, as they are at one place of a script."""

    variables: dict[str, Text | list[Text]]
    arguments: list[str]
    script: str = ""

    def expand(self, raw: str, *, split: bool = True) -> list[Text]:
        """The words that ``raw`` becomes: none, one or several. Without ``split`` (an assignment): one."""
        return _Expansion(self, split).run(raw)

    def value(self, raw: str) -> Text:
        """As the right side of an assignment."""
        return self.expand(raw, split=False)[0]

    def scalar(self, name: str) -> Text | None:
        """A variable's value, None if it is not set."""
        if name.isdigit():
            position = int(name)
            if position == 0:
                return Text.of(self.script)
            return Text.of(self.arguments[position - 1]) if position <= len(self.arguments) else None
        if name == "#":
            return Text.of(str(len(self.arguments)))
        found = self.variables.get(name)
        return (found[0] if found else None) if isinstance(found, list) else found

    def array(self, name: str) -> list[Text]:
        """All elements of an array, or the arguments (``@``)."""
        if name in "@*":
            return [Text.of(argument) for argument in self.arguments]
        found = self.variables.get(name)
        return found if isinstance(found, list) else [found] if found is not None else [_unset(name)]


def _unset(name: str) -> Text:
    what = f"argument ${name}" if name.isdigit() else f"variable {name}"
    return Text((Unknown(f"{what} is not set in the script"),))


class _Expansion:
    """Builds words. ``_open`` says that there is a word, even an empty one."""

    def __init__(self, shell: Shell, split: bool) -> None:
        self.shell, self.split = shell, split
        self.done: list[Text] = []
        self.current, self._open = Text(), not split

    def run(self, raw: str) -> list[Text]:
        if self.split and re.search(r"(?<![$\\])\{[^{}\"' ]*(,|\.\.)[^{}\"' ]*\}", raw) and not raw.startswith("'"):
            return [Text((Unknown(f"brace expansion {raw}"),))]
        at = 0
        if raw == "~" or raw.startswith("~/"):
            self._put(self._parameter("HOME"))
            at = 1
        while at < len(raw):
            at = self._step(raw, at, quoted=False)
        if self._open:
            self.done.append(self.current)
        return self.done

    def _step(self, raw: str, at: int, *, quoted: bool) -> int:
        """Expand what stands at ``at``; returns where the rest begins."""
        char = raw[at]
        if char == "\\" and (not quoted or raw[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")):
            if raw[at + 1 : at + 2] != "\n":
                self._put(Text.of(raw[at + 1 : at + 2]))
            return at + 2
        if char == "'" and not quoted:
            end = raw.index("'", at + 1)
            self._open = True
            self._put(Text.of(raw[at + 1 : end]))
            return end + 1
        if char == '"' and not quoted:
            return self._double_quoted(raw, at + 1)
        if char == "`":
            end = raw.find("`", at + 1)
            end = len(raw) - 1 if end < 0 else end
            self._add(_command(raw[at + 1 : end], self.shell), quoted)
            return end + 1
        if char == "$":
            return self._dollar(raw, at, quoted)
        self._put(Text.of(char))
        return at + 1

    def _double_quoted(self, raw: str, at: int) -> int:
        # "${A[@]}" of an empty array is no word at all; "" is one.
        if not re.match(r'\$(@|\{@\}|\{[A-Za-z_]\w*\[@\]\})"', raw[at:]):
            self._open = True
        while raw[at] != '"':
            at = self._step(raw, at, quoted=True)
        return at + 1

    def _dollar(self, raw: str, at: int, quoted: bool) -> int:
        rest = raw[at + 1 :]
        if rest.startswith("(("):
            end = _closing(raw, at + 1)
            if raw[end - 1] == ")":
                self._add(self._arithmetic(raw[at + 3 : end - 1]), quoted)
                return end + 1
        if rest.startswith("("):
            end = _closing(raw, at + 1)
            self._add(_command(raw[at + 2 : end], self.shell), quoted)
            return end + 1
        if rest.startswith("{"):
            end = _closing(raw, at + 1)
            self._braced(raw[at + 2 : end], quoted)
            return end + 1
        if rest.startswith(("'", '"')) and not quoted:
            self._put(Text((Unknown("a quote of the form $'...'"),)))
            return _past_quote(raw, at + 1)
        if found := _NAME.match(rest) or re.match(r"[@*#?$!0-9]", rest):
            self._braced(found[0], quoted)
            return at + 1 + found.end()
        self._put(Text.of("$"))
        return at + 1

    def _braced(self, inner: str, quoted: bool) -> None:
        """``${inner}``."""
        found = _PARAMETER.fullmatch(inner)
        if found is None or (found[1] and found[4]):
            self._put(Text((Unknown(f"the expansion ${{{inner}}}"),)))
            return
        counted, name, index, rest = found[1], found[2], (found[3] or "")[1:-1], found[4]
        if (name in "@*" and not rest) or (index in ("@", "*") and index and not rest):
            self._elements(self.shell.array(name), counted, "*" in (name, index), quoted)
        elif name in "?$!" or (rest and (index or name in "@*#")):
            self._put(Text((Unknown(f"the expansion ${{{inner}}}"),)))
        elif counted:
            known = self._parameter(name, index).known
            self._put(Text.of(str(len(known))) if known is not None else self._parameter(name, index))
        else:
            self._add(self._modified(name, index, rest), quoted)

    def _elements(self, elements: list[Text], counted: str, joined: bool, quoted: bool) -> None:
        if counted:
            self._put(Text.of(str(len(elements))))
        elif not self.split or (quoted and joined):
            for number, element in enumerate(elements):
                self._put(Text.of(" ") + element if number else element)
        else:
            for number, element in enumerate(elements):
                if number:
                    self._end()
                self._add(element, quoted)
                self._open = self._open or quoted

    def _parameter(self, name: str, index: str = "") -> Text:
        if index:
            elements = self.shell.array(name)
            return elements[int(index)] if int(index) < len(elements) else Text()
        found = self.shell.scalar(name)
        return _unset(name) if found is None else found

    def _modified(self, name: str, index: str, rest: str) -> Text:
        """``${name<rest>}``."""
        if not rest:
            return self._parameter(name, index)
        found = self.shell.scalar(name)
        operator = next((sign for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(sign)), "")
        if operator:
            if found is not None and found.known is None:
                return found
            given = found is not None and (found.known != "" or ":" not in operator)
            word = rest[len(operator) :]
            if operator in (":+", "+"):
                return self.shell.value(word) if given else Text()
            if given:
                assert found is not None
                return found
            if operator in (":?", "?"):
                return _unset(name)
            default = self.shell.value(word)
            if operator in (":=", "="):
                self.shell.variables[name] = default
            return default
        known = self._parameter(name).known
        if known is None:
            return self._parameter(name)
        if rest in (",,", "^^"):
            return Text.of(known.lower() if rest == ",," else known.upper())
        return _trimmed(known, rest)

    def _arithmetic(self, expression: str) -> Text:
        filled = self.shell.expand(f'"{expression}"', split=False)[0]
        if filled.known is None:
            return Text(tuple(part for part in filled.parts if isinstance(part, Unknown)))
        try:
            return Text.of(str(evaluate(filled.known, self._number)))
        except NotKnown as error:
            return Text((Unknown(f"$(({expression})): {error}"),))

    def _number(self, name: str) -> str:
        found = self._parameter(name)
        if found.known is None:
            raise NotKnown("; ".join(found.reasons))
        return found.known

    def _put(self, text: Text) -> None:
        """Add to the current word, as it is."""
        self.current += text
        self._open = self._open or bool(text.parts)

    def _add(self, text: Text, quoted: bool) -> None:
        """Add what an expansion gave: split at blanks where it is not quoted."""
        if quoted or not self.split:
            self._put(text)
            return
        for part in text.parts:
            if isinstance(part, Unknown):
                self._put(Text((part,)))
                continue
            pieces = _BLANK.split(part)
            for number, piece in enumerate(pieces):
                if number:
                    self._end()
                self._put(Text.of(piece))

    def _end(self) -> None:
        if self._open:
            self.done.append(self.current)
        self.current, self._open = Text(), False


def _closing(raw: str, at: int) -> int:
    """Where the bracket at ``at`` closes."""
    opened: list[str] = []
    closing = {"(": ")", "{": "}"}
    while at < len(raw):
        char = raw[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            at = _past_quote(raw, at) - 1
        elif char in closing:
            opened.append(closing[char])
        elif opened and char == opened[-1]:
            opened.pop()
            if not opened:
                return at
        at += 1
    return len(raw) - 1


def _past_quote(raw: str, at: int) -> int:
    quote, at = raw[at], at + 1
    while at < len(raw) and raw[at] != quote:
        at += 2 if raw[at] == "\\" and quote == '"' else 1
    return at + 1


def _trimmed(value: str, rest: str) -> Text:
    """``#``, ``##``, ``%`` and ``%%`` with a pattern of plain characters and ``*``."""
    found = re.fullmatch(r"(##?|%%?)([\w*/.:=@+-]*)", rest)
    if found is None:
        return Text((Unknown(f"the expansion ${{...{rest}}}"),))
    operator, pattern = found[1], ".*".join(map(re.escape, found[2].split("*")))
    lengths = range(len(value) + 1) if operator in ("#", "%") else range(len(value), -1, -1)
    for length in lengths:
        part = value[:length] if operator[0] == "#" else value[len(value) - length :]
        if re.fullmatch(pattern, part, re.S):
            return Text.of(value[length:] if operator[0] == "#" else value[: len(value) - length])
    return Text.of(value)


def _command(source: str, shell: Shell) -> Text:
    """What a command substitution prints, of the few that only look at names."""
    words = [text for raw in _plain_words(source) for text in shell.expand(raw)]
    known = [word.known for word in words]
    if known == ["pwd"]:
        found = shell.scalar("PWD")
        return _unset("PWD") if found is None else found
    if len(known) == 2 and known[0] in ("basename", "dirname") and known[1]:
        path = known[1].rstrip("/") or "/"
        return Text.of(posixpath.basename(path) if known[0] == "basename" else posixpath.dirname(path) or ".")
    return Text((Unknown(f"the output of $({source.strip()})"),))


def _plain_words(source: str) -> Sequence[str]:
    from posttrain.interop.verl.lex import commands

    found = list(commands(source))
    return [word for word in found[0].words if isinstance(word, str)] if len(found) == 1 else []


def variables_of(values: Mapping[str, str]) -> dict[str, Text | list[Text]]:
    """Variables of a shell from plain texts."""
    return {name: Text.of(value) for name, value in values.items()}
