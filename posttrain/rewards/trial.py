"""One call of a user's reward function before a run starts, so that a bug in it costs seconds and not a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from posttrain.config import RewardConfig, SandboxConfig
from posttrain.core.errors import CodeError
from posttrain.core.types import Prompt
from posttrain.rewards.custom import BrokenFunction, load_function
from posttrain.rewards.grade import GradeItem, GraderPool


def try_function(
    reward: RewardConfig, sandbox: SandboxConfig, plugins: Sequence[str], prompt: Prompt, file: str
) -> str | None:
    """Grade the gold answer of a row with `reward.function`, in a grader process as in the run.

    Args:
        prompt: the row.
        file: where it is from, for messages.

    Returns:
        A warning where the function raised on this row, hung or ended its process; None where it gave a score.

    Raises:
        ConfigError: there is no such function. As ``CodeError``: it does not take the arguments of a reward function,
            has a bug, or returns no score.
    """
    load_function(reward.function, reward.function_kwargs)
    truth = prompt.ground_truth
    answer = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    item = GradeItem(prompt.data_source, answer, truth, prompt.extra_info)
    with GraderPool(reward.model_copy(update={"workers": 1}), sandbox, plugins) as pool:
        (score,) = asyncio.run(pool.grade([item]))
    if score.error is None:
        return None
    message = f"{file}, row {prompt.index}: {score.error}"
    if isinstance(score, BrokenFunction):
        raise CodeError(message, hint="the function was tried on the gold answer of this row: correct it")
    return f"{message}; it was tried on the gold answer of this row"
