"""Silence for what libraries say of themselves: progress bars, and lines about their own parts. One place, for the
driver and for workers, whose logs are shown when they fail."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers asks for it too, when it loads weights
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""Variables that tqdm, transformers and datasets look at."""
_TALKATIVE = (
    "torchao",  # which of its kernels do not fit this machine
    "torch.utils._pytree",  # that torchao registers its types in an older way
)
"""Loggers of which only errors are shown."""


def quiet_libraries() -> None:
    """Turn progress bars and remarks of libraries off, in this process and those that it starts. A variable that the
    user has set stays as it is. It imports none of the libraries, and must come before them."""
    for name, value in _BARS.items():
        os.environ.setdefault(name, value)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make imports within the body find no such package, as if it were not installed. One that this process has
    imported already stays."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # how Python marks what cannot be imported
    try:
        yield
    finally:
        del sys.modules[package]
