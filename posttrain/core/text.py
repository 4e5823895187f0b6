"""What models, tools, data sets, services and configs say, made safe for a terminal and for Markdown.

Everything that is printed goes through ``printable``: what commands print in ``posttrain.cli.console``, runs in their
views, tables in ``table``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Control characters of ASCII and Latin-1 (escape sequences begin with one), marks that change the direction of text,
# characters without width, line ends of Unicode.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
# What stands before the host of a URL. A password may hold a slash that should have been escaped.
_LOGIN = re.compile(r"""(?<=://)(?:[^/?#\s"'<>]*|[^/?#\s"'<>:]*:(?!\d*/)[^?#\s"'<>]*)(?=@)""")
_MARKUP = re.compile(r"[\\`*\[\]<>#~&$]")


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` for a terminal: characters that are not seen, or that a terminal obeys, are escapes, but for those in
    ``keep``; and users and passwords in URLs are ``***``."""
    seen = _UNSEEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), redacted(text))
    return seen.encode("utf-8", "backslashreplace").decode()


def redacted(text: str) -> str:
    """``text`` with ``***`` for users and passwords in URLs."""
    return _LOGIN.sub("***", text)


def has_login(text: str) -> bool:
    """Return whether a URL in ``text`` names a user or a password."""
    return _LOGIN.search(text) is not None


def encodable(text: str) -> str:
    """``text`` with question marks for halves of surrogate pairs, which JSON can bring and UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shortened(text: str, width: int) -> str:
    """``text`` in one line of at most so many characters: its beginning and its end."""
    line = " ".join(printable(text).split())
    if len(line) <= width:
        return line
    tail = width // 3
    return f"{line[: width - tail - 3].rstrip()} … {line[-tail:].lstrip()}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", numbers: bool = True) -> Table:
    """Return a table whose cells are shown as they are, and not read as rich's markup.

    The first column has names, each in one line. The others have ``numbers``, on the right and never broken, or text.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for column in columns:
        first = not made.columns
        made.add_column(column, justify="left" if first or not numbers else "right", no_wrap=first or numbers)
    for name, *cells in rows:
        made.add_row(Text(printable(name, "")), *(Text(printable(cell)) for cell in cells))
    return made


def markdown(text: str) -> str:
    """``text`` as words of a line of Markdown, which shows it as it is: no markup, no HTML, no line break."""
    return _MARKUP.sub(r"\\\g<0>", printable(" ".join(text.split()), ""))


def markdown_code(text: str) -> str:
    """``text`` in one line of Markdown, as code."""
    line = printable(" ".join(text.split()), "")
    fence = "`" * (1 + longest_run("`", line))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def markdown_block(text: str) -> str:
    """Lines of ``text`` as a block of Markdown that nothing in them ends."""
    fence = "`" * max(3, 1 + longest_run("`", text))
    return f"{fence}text\n{printable(text)}\n{fence}"


def longest_run(character: str, text: str) -> int:
    """The most of one character that stand side by side."""
    return max((len(run) for run in re.findall(f"{re.escape(character)}+", text)), default=0)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
