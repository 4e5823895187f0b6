"""Small files that others may read, or write as well, while they are written."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it: a reader finds the old one or the new one, and of several writers
    the last one wins. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The same with text, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))
