"""posttrain takes a language model from raw data to a better model.

The names below are the Python API (docs/python-api.md); the command line has the same functions. They are imported on
first use: ``import posttrain`` takes milliseconds and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.api import (
        load_run,
        merge_checkpoint,
        run_eval,
        run_generate,
        run_preference,
        run_prep,
        run_rl,
        run_sft,
    )
    from posttrain.core.errors import Interrupted, RunError, UserError
    from posttrain.prep.datasets.base import Dataset
    from posttrain.rewards import Grader
    from posttrain.tools.base import Tool

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "Grader",
    "Interrupted",
    "RunError",
    "Tool",
    "UserError",
    "__version__",
    "load_run",
    "merge_checkpoint",
    "run_eval",
    "run_generate",
    "run_preference",
    "run_prep",
    "run_rl",
    "run_sft",
]

_ELSEWHERE = {
    "Dataset": "posttrain.prep.datasets.base",
    "Grader": "posttrain.rewards",
    "Interrupted": "posttrain.core.errors",
    "RunError": "posttrain.core.errors",
    "Tool": "posttrain.tools.base",
    "UserError": "posttrain.core.errors",
}
"""Modules of the public names that are not in ``posttrain.api``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "posttrain.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
