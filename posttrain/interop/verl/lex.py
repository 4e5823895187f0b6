"""Splits a bash script into simple commands, without expanding anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from posttrain.core.errors import DataError

_OPERATORS = ("&&", "||", ";;", "|&", "\n", ";", "&", "|", "(", ")")
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|>>|>\||>&|<&|<>|>|<)")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")


@dataclass(frozen=True)
class Array:
    """``NAME=(...)`` or ``NAME+=(...)``."""

    name: str
    append: bool
    words: tuple[str, ...]


@dataclass
class Command:
    """The words between two operators, as they are written."""

    line: int
    before: str
    """The operator before it; empty for the first."""
    words: list[str | Array] = field(default_factory=list)


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a script, in order; redirections, comments and here-documents are left out. ``(`` and
    ``)`` stand before and after what they enclose.

    Raises:
        DataError: a quote or bracket is not closed.
    """
    scanner = _Scanner(text)
    current = Command(1, "")
    while (token := scanner.token()) is not None:
        if isinstance(token, _Operator):
            if current.words or token.text in "()":
                yield current
            current = Command(scanner.line, token.text)
        else:
            if not current.words:
                current.line = scanner.started
            current.words.append(token)
    if current.words:
        yield current


@dataclass(frozen=True)
class _Operator:
    text: str


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.started = 1
        """Line on which the last word began."""
        self._documents: list[tuple[str, bool]] = []
        """(end mark, may be indented) of here-documents that begin on the next line."""

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def token(self) -> str | Array | _Operator | None:
        """The next word, array or operator; None at the end."""
        while True:
            self._skip_blank()
            if self.at >= len(self.text):
                return None
            if self.text.startswith("<<", self.at):
                self._here_document()
            elif found := _REDIRECTION.match(self.text, self.at):
                self.at = found.end()
                self._skip_blank()
                self._word()  # the file, or the number of a stream
            else:
                break
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                if operator == "\n":
                    self._skip_documents()
                return _Operator(operator)
        self.started = self.line
        if found := _ARRAY.match(self.text, self.at):
            self.at = found.end()
            return Array(found[1], bool(found[2]), tuple(self._elements()))
        return self._word()

    def _skip_blank(self) -> None:
        """Blanks, continued lines, and a comment up to the end of its line, where no backslash continues it."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _elements(self) -> Iterator[str]:
        while True:
            self._skip_blank()
            if self.at >= len(self.text):
                raise self._error("( of an array")
            if self.text[self.at] == "\n":
                self.at += 1
            elif self.text[self.at] == ")":
                self.at += 1
                return
            elif self.text[self.at] in ";&|<>(":
                raise self._error("( of an array")
            else:
                yield self._word()

    def _word(self) -> str:
        begin = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif char in "'\"`":
                self._quoted(char)
            elif self.text.startswith(("$(", "${"), self.at):
                self._bracketed()
            elif char in " \t\r\n;&|()<>":
                break
            else:
                self.at += 1
        return self.text[begin : self.at]

    def _quoted(self, quote: str) -> None:
        begin = self.at
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == quote:
                self.at += 1
                return
            if char == "\\" and quote != "'":
                self.at += 2
            elif quote == '"' and self.text.startswith(("$(", "${"), self.at):
                self._bracketed()
            else:
                self.at += 1
        raise self._error(quote, begin)

    def _bracketed(self) -> None:
        """Past the bracket that closes ``$(`` or ``${``."""
        begin = self.at
        opened, closing = [self.text[self.at + 1]], {"(": ")", "{": "}"}
        self.at += 2
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 2
            elif char in "'\"":
                self._quoted(char)
            elif char == closing[opened[-1]]:
                self.at += 1
                opened.pop()
                if not opened:
                    return
            else:
                if char in "({":
                    opened.append(char)
                self.at += 1
        raise self._error("$" + self.text[begin + 1], begin)

    def _here_document(self) -> None:
        self.at += 2
        if self.text.startswith("<", self.at):  # a here-string
            self.at += 1
            self._skip_blank()
            self._word()
            return
        indented = self.text.startswith("-", self.at)
        self.at += indented
        self._skip_blank()
        self._documents.append((self._word().strip("'\"").replace("\\", ""), indented))

    def _skip_documents(self) -> None:
        for mark, indented in self._documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if indented else line) == mark:
                    break
        self._documents.clear()

    def _error(self, what: str, at: int | None = None) -> DataError:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return DataError(f"line {line}: {what} is not closed", hint="does bash read this script?")
