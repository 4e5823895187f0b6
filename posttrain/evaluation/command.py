"""`posttrain eval`: grade responses and print their scores, by data source and level; or compare two files of them."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posttrain.config import Config, RewardConfig, SandboxConfig
from posttrain.config.describe import readers_of
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.files import check_new, refuse_inputs, write_text
from posttrain.core.text import printable
from posttrain.data.parquet import open_parquet
from posttrain.evaluation.compare import compare, print_comparison
from posttrain.evaluation.failures import FailuresFile, check_suffix, examined
from posttrain.evaluation.grading import Failure, Graded, GradedProblem, failure_of, grade, to_grade
from posttrain.evaluation.rows import read_responses
from posttrain.evaluation.tables import Report, make_report, print_report
from posttrain.generation.output import telling_tools
from posttrain.rewards import grader_name
from posttrain.rewards.custom import load_function
from posttrain.rewards.grade import GraderPool
from posttrain.tools.base import telling_warning
from posttrain.tracking.console import Mode
from posttrain.tracking.tracker import Tracker

if TYPE_CHECKING:
    from posttrain.config.presets import Resolved

_WIDE = 240
"""Characters of a line that goes to no terminal, at most."""

PAGER = Path("-")
"""As the file of failures: they are shown page by page."""


def check_output(
    cfg: Config, out: Path | None, failures: Path | None, *, read: Sequence[str | Path], as_json: bool = False
) -> None:
    """Check, before anything is sampled or graded, that the results can go where they are to.

    Args:
        read: the files that the command reads.

    Raises:
        ConfigError: a file exists and `run.overwrite` is false, is one of ``read`` or cannot be written, the failures
            have a suffix that is not known, or two results would share a file or stdout.
    """
    if failures == PAGER:
        if as_json:
            raise ConfigError("--json and --failures - both write to stdout", hint="give --failures a file")
        failures = None
    if failures is not None:
        check_suffix(failures)
    for path, option in ((out, "--out"), (failures, "--failures")):
        if path is not None:
            check_new(path, option, overwrite=cfg.run.overwrite)
            refuse_inputs(path, option, read)
    if out is not None and failures is not None and os.path.realpath(out) == os.path.realpath(failures):
        raise ConfigError(f"--out and --failures both name {out}", hint="give each a file of its own")


def run(file: Path, cfg: Config, as_json: bool, out: Path | None = None, failures: Path | None = None) -> None:
    """Grade ``file`` and print a table (or one JSON line) on stdout.

    Args:
        out: also write the JSON there.
        failures: also write there what was wrong, or show it (``PAGER``).
    """
    with ExitStack() as closing:
        place = failures
        if failures == PAGER:
            place = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-eval-"))) / "failures.md"
        found = score(file, cfg, place)
        if not as_json:
            print_report(found, cfg.eval.pass_at, _console())
        _put(found.as_dict(), as_json, out)
        if failures == PAGER and place is not None:
            _page(place)
        elif failures is not None:
            typer.echo(printable(f"wrote {failures}"), err=True)


def score(file: Path, cfg: Config, failures: Path | None = None) -> Report:
    """Grade ``file`` as the config of `posttrain eval` says, and write what was wrong to ``failures``.

    Raises:
        UserError, RunError: as ``evaluate``; or the config says what has no meaning here.
    """
    _check_reward(cfg.reward)
    return evaluate(
        file, cfg.eval.pass_at, cfg.reward, cfg.sandbox, cfg.plugins,
        resamples=cfg.eval.resamples, seed=cfg.run.seed, failures=failures, console=_progress_of(cfg),
    )  # fmt: skip


def run_comparison(a: Path, b: Path, cfg: Config, as_json: bool, out: Path | None = None) -> None:
    """Grade two files and print how they differ on the problems that both have."""
    _check_reward(cfg.reward)
    console = _progress_of(cfg)
    of_a, of_b = (_grade(file, cfg.reward, cfg.sandbox, cfg.plugins, None, console)[0] for file in (a, b))
    if names := sorted({name for file in (a, b) for name in telling_tools(file)}):
        typer.echo(printable(telling_warning(names)), err=True)
    found = compare((str(a), str(b)), of_a, of_b, resamples=cfg.eval.resamples, seed=cfg.run.seed)
    if not as_json:
        print_comparison(found, _console())
    _put(found.as_dict(), as_json, out)


def sample(resolved: Resolved) -> Path:
    """Responses of the model in ``resolved``, a config of `posttrain generate`: sampled now, or before with the same
    settings. What would be found wrong after hours of sampling is looked at first.

    Raises:
        UserError: as `posttrain generate`; also where there are fewer responses than a k of pass@k, or no grader.
    """
    from posttrain.core.registry import load_plugins
    from posttrain.generation import command as generate

    cfg = resolved.config
    load_plugins(cfg.plugins)
    _check_reward(cfg.reward)
    if max(cfg.eval.pass_at) > cfg.rollout.n:
        k = max(cfg.eval.pass_at)
        raise ConfigError(
            f"pass@{k} needs {k} responses per problem, and rollout.n = {cfg.rollout.n}", hint=f"give --n {k}"
        )
    if cfg.reward.function:
        load_function(cfg.reward.function, cfg.reward.function_kwargs)
    elif cfg.generate.data and not cfg.rollout.env and not cfg.rollout.has_agent:  # these give the scores themselves
        file = open_parquet(cfg.generate.data, ("data_source",))
        column = file.read(["data_source"])["data_source"]
        file.close()
        for source in column.unique().to_pylist():
            grader_name(str(source))
    return generate.run(resolved, reuse=True)


def files_of(cfg: Config) -> list[str | Path]:
    """Return the files that ``sample`` reads and writes: prompts, where it has a file of them, and responses."""
    from posttrain.generation.command import output_of

    return [*filter(None, [cfg.generate.data]), output_of(cfg)]


def with_run_name(resolved: Resolved) -> Resolved:
    """Return the config of the run that `eval` samples in, named by model, data and what plays the episodes unless the
    command line names it: two models have two runs."""
    if resolved.provenance["run.name"] in ("--set", "flag --name"):
        return resolved
    cfg = resolved.config
    data = Path(cfg.generate.data)
    words = [cfg.model.path, f"{data.parent.name}-{data.stem}" if cfg.generate.data else ""]
    words += [cfg.rollout.env, cfg.rollout.agent, cfg.rollout.agent_command]
    return resolved.named("-".join(["eval", *(_slug(word) for word in words if word)]), "model and data")


def _slug(text: str) -> str:
    last = [part for part in text.rstrip("/").split("/") if part][-1:] or ["model"]
    return re.sub(r"[^\w.-]+", "-", last[0]).strip("-.")


def evaluate(
    file: Path,
    pass_at: Sequence[int],
    reward: RewardConfig | None = None,
    sandbox: SandboxConfig | None = None,
    plugins: Sequence[str] = (),
    *,
    resamples: int = 0,
    seed: int = 0,
    failures: Path | None = None,
    console: Mode = "quiet",
) -> Report:
    """Grade every response of ``file``: by the reward of its environment or agent, where that gave one, with the grader
    of its data source, or with ``reward.function``.

    Args:
        resamples: of the bootstrap of the intervals; 0: none.
        failures: a file for what was wrong.
        console: how stderr shows how far it is, as `run.console`.

    Raises:
        DataError: the file is missing, unreadable, empty or of another schema; the message names row and column.
        ConfigError: a k is below 1 or above the number of responses, or a data source has no grader.
        RunError: not one response could be graded.
    """
    if not pass_at or min(pass_at) < 1:
        raise ConfigError(f"pass@k needs k >= 1, got {list(pass_at)}", hint="for example --pass-at 1,5")
    for row in read_responses(file):
        if len(row.responses) < max(pass_at):
            raise ConfigError(
                f"pass@{max(pass_at)} needs {max(pass_at)} responses per problem; row {row.number} of {file} has "
                f"{len(row.responses)}",
                hint=f"sample more with `posttrain generate --n {max(pass_at)}`, or give --pass-at "
                f"{len(row.responses)}",
            )
    problems, first = _grade(file, reward or RewardConfig(), sandbox, plugins, failures, console)
    return make_report(
        str(file), problems, pass_at, resamples, seed,
        first_error=first.get("grader_failed"), first_unfinished=first.get("unfinished"),
        tells_answer=telling_tools(file),
    )  # fmt: skip


def _grade(
    file: Path,
    reward: RewardConfig,
    sandbox: SandboxConfig | None,
    plugins: Sequence[str],
    failures: Path | None,
    console: Mode,
) -> tuple[list[GradedProblem], dict[Failure, str]]:
    """The graded problems of ``file``, and the first message of each kind of failure. Raises ``RunError`` where nothing
    could be graded."""
    if reward.function:
        load_function(reward.function, reward.function_kwargs)
    shown = 0
    first: dict[Failure, str] = {}
    with ExitStack() as closing:
        sink = None if failures is None else closing.enter_context(FailuresFile(failures))

        def seen(graded: Graded) -> None:
            nonlocal shown
            for number, score in enumerate(graded.scores):
                if score is not None and shown < reward.examine:
                    shown += 1
                    typer.echo(printable(examined(graded, number, score)), err=True)
                if (failure := failure_of(score)) is not None:
                    message = graded.row.errors[number] if score is None else score.error
                    first.setdefault(failure, f"row {graded.row.number}: {message}")
            if sink is not None:
                sink.add(graded)

        graders = closing.enter_context(GraderPool(reward, sandbox, plugins))
        rows = partial(read_responses, file, given=not reward.function)
        count = sum(len(to_grade(row)) for row in rows())
        tracker = closing.enter_context(Tracker(None, f"eval {file}", None, ["console"], console=console))
        graded = None
        if count:
            graded = closing.enter_context(tracker.counting(f"grading {file}", count, "responses"))
        problems = grade(rows(), graders, seen, graded)
        if not any(problem.graded > problem.unfinished for problem in problems):
            message = next(first[kind] for kind in ("grader_failed", "unfinished", "episode_failed") if kind in first)
            raise RunError(f"{file}: not one response could be graded", hint=f"the first failure: {message}")
    return problems, first


def _progress_of(cfg: Config) -> Mode:
    """How `eval` shows how far it is: a table is its result, so it has a panel only where it is asked for."""
    return "plain" if cfg.run.console == "auto" else cfg.run.console


def _check_reward(reward: RewardConfig) -> None:
    """`eval` reports what graders say. Raises ``ConfigError`` for what only training composes."""
    default = RewardConfig()
    for name in RewardConfig.model_fields:
        if "eval" not in readers_of(f"reward.{name}") and getattr(reward, name) != getattr(default, name):
            raise ConfigError(f"reward.{name} has no meaning in eval", hint="it makes the reward of `posttrain rl`")


def _put(found: dict[str, Any], as_json: bool, out: Path | None) -> None:
    """Write what was found as one line of JSON: to stdout, and then to a file, which may fail."""
    line = json.dumps(found)
    if as_json:
        print(line)
    if out is not None:
        write_text(out, line + "\n", hint="choose another --out")


def _console() -> Any:
    from rich.console import Console

    console = Console()
    # A file or a pipe has no width that a table would have to fit into.
    return console if console.is_terminal else Console(width=_WIDE)


def _page(file: Path) -> None:
    text = printable(file.read_text(encoding="utf-8"))
    console = _console()
    if console.is_terminal:
        with console.pager():
            console.print(text, markup=False, highlight=False)
    else:
        print(text)
