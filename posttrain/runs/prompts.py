"""The prompts of a run: where they come from, and checks of them before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.registry import unknown
from posttrain.core.text import shortened
from posttrain.data.chat import encoded_lengths, prompt_text
from posttrain.data.parquet import read_prompts, refuse_images
from posttrain.data.shards import one_file

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.config.presets import Resolved
    from posttrain.core.types import Prompt
    from posttrain.envs.base import Split
    from posttrain.rollout.context import EpisodeContext

_SHOWN = 10
"""Values of a field that a message shows."""


def check_prompts(prompts: Iterable[Prompt], env: EpisodeContext, file: str) -> None:
    """Check that no prompt is longer than `rollout.max_prompt_tokens`, before the first step.

    Raises:
        DataError: naming the file, the first row that is too long, how many are, and the longest; or a row with images.
    """
    prompts = list(prompts)
    _check_lengths(prompts, prompt_lengths(prompts, env, file), env.cfg.max_prompt_tokens, file)


def _check_lengths(prompts: Sequence[Prompt], lengths: Sequence[int], limit: int, file: str) -> None:
    """Raise as ``check_prompts`` does."""
    if too_long := [(p.index, length) for p, length in zip(prompts, lengths, strict=True) if length > limit]:
        row, length = too_long[0]
        others = "" if len(too_long) == 1 else f"; {_overlong([length for _, length in too_long])}"
        raise DataError(
            f"{file}, row {row}: the prompt has {length} tokens, rollout.max_prompt_tokens is {limit}{others}",
            hint="raise rollout.max_prompt_tokens, remove such rows, or in `rl` --set data.truncation=drop",
        )


def read_tasks(cfg: Config, env: EpisodeContext, split: Split, limit: int | None = None) -> tuple[list[Prompt], str]:
    """Return the first ``limit`` prompts (None: all) of a split, and where they come from, for messages.

    They are those of `data.train` or `data.val`, or the environment's own where the key is empty. There may be none to
    validate on.

    Raises:
        DataError: the file cannot be read.
        ConfigError: there is no file, and the environment has no tasks.
    """
    named = cfg.data.train if split == "train" else cfg.data.val
    own = env.world or env.agents
    if own is not None and not named:
        tasks = own.tasks(split)
        if not tasks and split == "train":
            raise ConfigError(f"{own.name} has no tasks of its own", hint="give --data FILE.parquet")
        return tasks[:limit], own.name
    if split == "val" and not named:
        return [], ""
    file = one_file(named)
    return read_prompts(file, limit), file


def select_prompts(
    prompts: Sequence[Prompt], keep: Mapping[str, Sequence[str | int | float]], file: str
) -> tuple[list[Prompt], str | None]:
    """Return the prompts that `data.keep` selects, and a message that says how many they are; None where it is empty.

    Raises:
        DataError: no prompt has such a field, or none is left.
    """
    chosen = list(prompts)
    for name, values in keep.items():
        if not any(prompt.extra_info.get(name) is not None for prompt in prompts):
            fields = {field for prompt in prompts for field in prompt.extra_info}
            raise DataError(f"{file}: no row has extra_info.{name} (data.keep)", hint=unknown(name, fields))
        left = [prompt for prompt in chosen if prompt.extra_info.get(name) in values]
        if not left:
            found = Counter(shortened(repr(prompt.extra_info.get(name)), 40) for prompt in chosen)
            common = ", ".join(value for value, _ in found.most_common(_SHOWN))
            raise DataError(
                f"{file}: no row has {_one_of(name, values)} (data.keep)",
                hint=f"extra_info.{name} has {len(found):,} values, the most frequent are {common}",
            )
        chosen = left
    if not keep:
        return chosen, None
    wanted = " and ".join(_one_of(name, values) for name, values in keep.items())
    return chosen, f"{file}: {len(chosen):,} of {len(prompts):,} prompts have {wanted} (data.keep)"


def _one_of(name: str, values: Sequence[str | int | float]) -> str:
    return f"{name} = {' or '.join(map(repr, values))}"


class FittingPrompts(NamedTuple):
    """The prompts of an RL run."""

    prompts: list[Prompt]
    note: str | None
    """A message about prompts that are left out; None: none is"""
    mean_tokens: float
    """Mean length of the prompts; 0 where there are none"""


def fitting_prompts(prompts: Sequence[Prompt], env: EpisodeContext, file: str, truncation: str) -> FittingPrompts:
    """Return the prompts of an RL run. ``truncation = "drop"`` leaves out those above `rollout.max_prompt_tokens`.

    Raises:
        DataError: naming the file and the row of a prompt that is too long, or has images; or none is left.
    """
    limit, lengths = env.cfg.max_prompt_tokens, prompt_lengths(prompts, env, file)
    if truncation != "drop":
        _check_lengths(prompts, lengths, limit, file)
    fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
    if prompts and not fitting:
        raise DataError(
            f"{file}: each of its {len(prompts)} prompts has more than rollout.max_prompt_tokens = {limit} tokens",
            hint="raise rollout.max_prompt_tokens",
        )
    note = None
    if too_long := [length for length in lengths if length > limit]:
        note = (
            f"{file}: {_overlong(too_long)}, and left out (rollout.max_prompt_tokens = {limit}, data.truncation = drop)"
        )
    total = sum(length for length in lengths if length <= limit)
    return FittingPrompts(fitting, note, total / max(1, len(fitting)))


def _overlong(lengths: Sequence[int]) -> str:
    """Return how many prompts are too long, and the length of the longest, for a message."""
    many = "prompts are" if len(lengths) > 1 else "prompt is"
    return f"{len(lengths):,} {many} too long, the longest has {max(lengths)} tokens"


def prompt_lengths(prompts: Sequence[Prompt], env: EpisodeContext, file: str) -> list[int]:
    """Return the lengths of prompts in tokens. Raises ``DataError`` for one with images that are not read, or cannot
    be."""
    if env.vision is None or env.world is not None or env.agents is not None:
        for prompt in prompts:
            refuse_images(prompt, file, prompt.index)
    if env.vision is None:
        texts = (prompt_text(p.messages, env.tokenizer, env.schemas, **env.template_kwargs) for p in prompts)
        return encoded_lengths(env.tokenizer, texts)
    lengths = []
    for prompt in prompts:
        try:
            lengths.append(len(env.prompt_ids(prompt)))
        except DataError as error:
            raise DataError(f"{file}: row {prompt.index}, {error.message}", hint=error.hint) from error
    return lengths


def check_reward(prompts: Sequence[Prompt], cfg: Config, env: EpisodeContext, file: str) -> str | None:
    """Check that every row can be graded: by its grader, the user's function, the reward model or the judge, in a
    sandbox where a grader runs programs. Tools that `reward.weights` names must be tools of the run.

    Args:
        file: the file of the first of ``prompts``.

    Returns:
        A warning where the user's function fails on the first row.

    Raises:
        ConfigError, ModelError: one of these checks fails.
    """
    from posttrain.models.reward import open_reward_model
    from posttrain.rewards import needs_sandbox
    from posttrain.rewards.judge import check_judge
    from posttrain.rewards.trial import try_function
    from posttrain.sandbox import check_sandbox

    unknown = [n for n in cfg.reward.weights if n.startswith("tool/") and n.removeprefix("tool/") not in env.tools]
    if unknown:
        raise ConfigError(
            f"reward.weights names {', '.join(unknown)}", hint=f"tools of this run: {', '.join(env.tools) or 'none'}"
        )
    if cfg.reward.model.path:
        open_reward_model(cfg.reward.model.path, trust_remote_code=cfg.model.trust_remote_code)
    if cfg.reward.judge.url:
        check_judge(cfg.reward.judge)
    if (env.world is not None or env.agents is not None) and not cfg.reward.function:
        return None  # an environment gives the verdict, and an agent may
    if cfg.reward.function:
        return try_function(cfg.reward, cfg.sandbox, cfg.plugins, prompts[0], file)
    # A sum evaluates every source, so that one without a grader is found here.
    if sum(needs_sandbox(source) for source in {p.data_source for p in prompts}):
        check_sandbox(cfg.sandbox)
    return None


def check_ground_truths(prompts: Sequence[Prompt], cfg: Config, env: EpisodeContext, file: str) -> None:
    """Check that a grader of posttrain finds a ground truth in every row that it judges: none of them does without. A
    user's grader or reward function, an environment and an agent may.

    Raises:
        DataError: naming the file and the first row without one.
    """
    from posttrain.rewards import GRADERS, grader_name

    if cfg.reward.function or env.world is not None or env.agents is not None:
        return
    for prompt in prompts:
        if prompt.ground_truth is not None:
            continue
        name = grader_name(prompt.data_source)
        if getattr(GRADERS.get(name), "__module__", "").startswith("posttrain."):
            raise DataError(
                f"{file}, row {prompt.index}: reward_model.ground_truth is null, and the grader {name!r} of "
                f"data source {prompt.data_source!r} needs one",
                hint="remove such rows, or grade every row with --set reward.function=my_task.py:grade",
            )


@contextmanager
def reading_validation() -> Iterator[None]:
    """Add to an error of the validation set that `data.val` names it: `--data` replaces `data.train` alone."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"data.val: {error.message}",
            hint=f"{error.hint}; --data replaces data.train alone: --set data.val=FILE, or --set data.val= for none",
        ) from error


def validation_note(resolved: Resolved, count: int, unit: str) -> str:
    """Return a line that says what the run is validated on and when.

    Args:
        count: size of the validation set.
        unit: plural name of its samples.
    """
    cfg, origin = resolved.config, resolved.provenance
    if not count:
        return f"no validation: {f'none of the {unit} of data.val are usable' if cfg.data.val else 'data.val is empty'}"
    files = [cfg.data.val] if isinstance(cfg.data.val, str) else cfg.data.val
    every = cfg.train.val_every
    when = "after the last step" if every is None else f"every {every} steps and after the last"
    source = f" of {', '.join(files)}" if cfg.data.val else ", which the environment or agent brings"
    text = f"validation on {count:,} {unit}{source}, {when}"
    if origin["data.val"].startswith("preset") and not origin["data.train"].startswith("preset"):
        text += (
            f"; data.val is still that of {origin['data.val']}: {origin['data.train'].removeprefix('flag ')} replaces "
            "data.train alone (--set data.val=FILE, or --set data.val= for none)"
        )
    return text
