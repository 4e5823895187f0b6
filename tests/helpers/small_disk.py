"""A file system of a few megabytes, that tests fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *, options: str = "") -> Iterator[Path]:
    """A tmpfs of so many bytes ("9m") in ``folder``. Skips the test where the user may not mount one."""
    disk = folder / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(disk)]
    done = subprocess.run(words, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(
            f"a small disk needs a root who may mount: {done.stderr.strip() if done else 'this is another user'}"
        )
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 65536):
            pass
    with (disk / "filler2").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 512):
            pass
