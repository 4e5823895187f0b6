"""A launch script of verl: which trainer it starts, and with which overrides. Nothing of it is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from posttrain.core.errors import DataError
from posttrain.interop.verl.expand import Shell, Text, Unknown, variables_of
from posttrain.interop.verl.lex import Array, Command, commands

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_OPENING = {"if", "for", "while", "until", "case", "select", "{", "(("}
_CLOSING = {"fi", "done", "esac", "}"}
_LEADING = {"then", "do", "else", "elif", "!", "time", "if", "while", "until", "{"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_KEY = re.compile(r"[+~]{0,2}[a-z_]\w*(\.\w+)+=")


Trainer = Literal["sft", "rl"]


@dataclass(frozen=True)
class Launch:
    """How a script starts a trainer."""

    module: str
    """``verl.trainer.main_ppo``, as after ``python -m``; of a file, its name without ``.py``."""
    line: int
    launcher: tuple[Text, ...]
    """The words before the module: ``torchrun --nproc_per_node=8``, perhaps behind ``ray job submit``."""
    words: tuple[Text, ...]
    """The words after it."""


@dataclass
class Script:
    """What was found in a script."""

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a person should look at: files that were not read, keys that bash does not pass on."""


def read_script(text: str, variables: Mapping[str, str], arguments: Sequence[str] = (), name: str = "") -> Script:
    """Follow the assignments of a script to the trainers that it starts.

    Args:
        variables: of the environment, as far as the script may see it.
        arguments: of the script, ``$1`` first.
        name: of the script, ``$0``.

    Raises:
        DataError: a quote or bracket is not closed.
    """
    reader = _Reader(Shell(variables_of(variables), list(arguments), name))
    for command in commands(text):
        reader.read(command)
    return reader.script


class _Reader:
    def __init__(self, shell: Shell) -> None:
        self.shell, self.script = shell, Script()
        self.depth = 0
        """Depth of blocks whose commands may run any number of times."""
        self.function = 0
        """Depth of braces of a function; its commands are not run where they stand."""
        self._defines = False
        """A function's name was the last command: its body comes."""

    def read(self, command: Command) -> None:
        words = list(command.words)
        if self._skip_function(command, words):
            return
        self.depth += (command.before == "(") - (command.before == ")")
        while words and isinstance(words[0], str) and words[0] in _LEADING | _OPENING | _CLOSING:
            word = words.pop(0)
            self.depth += (word in _OPENING) - (word in _CLOSING)
            if word in ("for", "select") and words and isinstance(words[0], str):
                self.shell.variables[words[0]] = Text((Unknown(f"{words[0]} of a loop, line {command.line}"),))
                return
            if word == "case":
                return
        if words:
            self._run(command, words, certain=self.depth <= 0 and command.before not in ("&&", "||"))

    def _skip_function(self, command: Command, words: list[str | Array]) -> bool:
        """Return whether the command belongs to the definition of a function."""
        if self.function:
            self.function += sum(word == "{" for word in words) - sum(word == "}" for word in words[:1])
            return True
        if words[:1] == ["function"]:
            self.function, self._defines = int("{" in words), "{" not in words
            return True
        # `name() {`: the lexer gives `name`, `(`, an empty command, `)`, and the body.
        if self._defines and words:
            self._defines = False
            self.function = int(words[0] == "{")
            return bool(self.function)
        if not words and command.before == "(":
            self.depth -= 1  # its bracket closes at once
            self._defines = True
            return False
        return False

    def _run(self, command: Command, words: list[str | Array], *, certain: bool) -> None:
        while words:
            word = words[0]
            found = _ASSIGNMENT.fullmatch(word) if isinstance(word, str) else word
            if found is None:
                break
            words.pop(0)
            pending = found
            # `A=1 python ...` is for that command only.
            if not any(isinstance(w, str) and not _ASSIGNMENT.fullmatch(w) for w in words):
                self._assign(pending, command, certain)
        if not words or isinstance(words[0], Array):
            return
        name = words[0]
        if name in _DECLARING:
            self._declare(command, words[1:], certain)
        elif name == "unset":
            for word in words[1:]:
                self.shell.variables.pop(str(word), None)
        elif name in ("source", ".") and len(words) > 1:
            self.script.notes.append(f"line {command.line} reads {words[1]}, which was not looked at")
        elif name in ("eval", "read", "mapfile", "readarray", "getopts"):
            self.script.notes.append(f"line {command.line}: `{name}` was not followed")
        else:
            self._simple(command, [text for w in words if isinstance(w, str) for text in self.shell.expand(w)])

    def _declare(self, command: Command, words: Iterable[str | Array], certain: bool) -> None:
        for word in words:
            found = _ASSIGNMENT.fullmatch(word) if isinstance(word, str) else word
            if found is not None:
                self._assign(found, command, certain)

    def _assign(self, found: re.Match[str] | Array, command: Command, certain: bool) -> None:
        name = found.name if isinstance(found, Array) else found[1]
        if not certain:
            reason = f"{name} is set only under a condition or in a block, line {command.line}"
            self.shell.variables[name] = Text((Unknown(reason),))
            return
        if isinstance(found, Array):
            elements = [text for word in found.words for text in self.shell.expand(word)]
            before = self.shell.array(name) if found.append and name in self.shell.variables else []
            self.shell.variables[name] = [*before, *elements]
        else:
            value = self.shell.value(found[3])
            self.shell.variables[name] = (self.shell.scalar(name) or Text()) + value if found[2] else value

    def _simple(self, command: Command, words: list[Text]) -> None:
        name = words[0].known if words else None
        if name == "shift":
            count = words[1].known if len(words) > 1 else "1"
            del self.shell.arguments[: int(count) if count and count.isdigit() else 1]
        elif name == "set" and len(words) > 1 and words[1].known == "--":
            self.shell.arguments = [word.known or "" for word in words[2:]]
        elif name == "cd":
            self._change_folder(words[1] if len(words) > 1 else Text())
        elif name is not None and _KEY.match(name):
            self.script.notes.append(
                f"line {command.line}: {name} is no part of the command above: bash ends it at a comment or a line "
                "without a backslash, so verl never saw it"
            )
        elif launch := _launch(words, command.line):
            self.script.launches.append(launch)

    def _change_folder(self, folder: Text) -> None:
        here, there = self.shell.scalar("PWD"), folder.known
        if here is None or here.known is None or there is None:
            self.shell.variables["PWD"] = Text((Unknown("the folder after a `cd`"),))
        else:
            self.shell.variables["PWD"] = Text.of(there if there.startswith("/") else f"{here.known}/{there}")


def _launch(words: Sequence[Text], line: int) -> Launch | None:
    """The trainer that a command starts, None if it starts none."""
    known = [word.known or "" for word in words]
    for index, word in enumerate(known):
        if word == "-m" and known[index + 1 : index + 2] and "." in known[index + 1]:
            return Launch(known[index + 1], line, tuple(words[:index]), tuple(words[index + 2 :]))
        before = known[:index]
        if word.endswith(".py") and any(re.fullmatch(r"(.*/)?(python[\d.]*|torchrun)", name) for name in before):
            module = word.removesuffix(".py").lstrip("./").replace("/", ".")
            return Launch(module, line, tuple(words[:index]), tuple(words[index + 1 :]))
    return None


def trainer_of(script: Script) -> tuple[Launch, Trainer]:
    """The trainer that a script starts, and its command here: ``sft`` or ``rl``.

    Raises:
        DataError: it starts none that is known.
    """
    known = [(launch, kind) for launch in script.launches if (kind := _kind(launch.module))]
    if not known:
        started = ", ".join(f"{launch.module} (line {launch.line})" for launch in script.launches) or "nothing"
        raise DataError(
            f"it starts no trainer of verl that is known here; it starts: {started}",
            hint="looked for python -m verl.trainer.main_ppo, recipe.dapo.main_dapo, verl.trainer.fsdp_sft_trainer, "
            "verl.trainer.sft_trainer; functions and `bash -c` are not read: put the command on a line of its own",
        )
    for launch, _ in known[1:]:
        script.notes.append(f"line {launch.line} starts {launch.module} as well: only the first was taken")
    return known[0]


def _kind(module: str) -> Trainer | None:
    """The command that does what a module of verl does."""
    last = module.rpartition(".")[2]
    if last in ("fsdp_sft_trainer", "sft_trainer"):
        return "sft"
    # Under experimental/ there are trainers that sample and train at the same time.
    return "rl" if last in ("main_ppo", "main_dapo") and "experimental" not in module else None
