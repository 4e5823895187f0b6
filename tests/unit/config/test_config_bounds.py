"""Every number of the config has bounds, and a value outside of them is one clear message."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import Config
from posttrain.config.keys import leaves_of
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError

BAD: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "negative": -1, "huge": 10**30}
SIGN = "may be negative"
ACCEPTED = {
    ("algo.entropy_coef", "negative"): SIGN + ": it then rewards certainty",
    ("algo.clip_cov_low", "negative"): SIGN + ": covariances are",
    ("algo.clip_cov_high", "negative"): SIGN + ": covariances are",
    ("reward.weights", "negative"): SIGN + ": a part may cost",
}
"""(key, kind of value) -> why the key's own bounds let it pass; other keys may still refuse it."""


def numbers(kind: Any) -> Iterator[type]:
    """The numeric types among the parts of an annotation."""
    if kind in (int, float):
        yield kind
    elif get_origin(kind) in (Annotated, Union, UnionType, list, tuple, dict):
        for part in get_args(kind):
            yield from numbers(part)


def numeric_keys() -> dict[str, Any]:
    return {key: kind for key, kind in leaves_of(Config) if next(numbers(kind), None) is not None}


def shaped(kind: Any, value: Any) -> Any:
    """The value in the place of a number in such a type."""
    origin = get_origin(kind)
    if origin is list:
        return [value]
    if origin is tuple:
        return [value] * len(get_args(kind))
    return {"score": value} if origin is dict else value


def test_the_walk_finds_the_numbers() -> None:
    keys = numeric_keys()
    assert {"train.optim.lr", "train.optim.betas", "critic.optim.eps", "eval.pass_at", "reward.weights"} <= keys.keys()
    assert {"algo.lr", "model.path", "run.overwrite", "data.template_kwargs", "tools"}.isdisjoint(keys)
    assert len(keys) > 110


@pytest.mark.parametrize("name", BAD)
def test_numbers_out_of_bounds_are_refused(name: str) -> None:
    passed: set[tuple[str, str]] = set()
    for key, kind in numeric_keys().items():
        flags: dict[str, Any] = {key: shaped(kind, BAD[name])}
        try:
            resolve("eval", None, [], flags)
        except ConfigError as error:
            # Of the combinations that a value may also break only the bounds name key, value, origin and default.
            if f"{key} = " in error.message and error.hint and f"the default of {key} is " in error.hint:
                continue
        passed.add((key, name))
    assert passed == {case for case in ACCEPTED if case[1] == name}


def test_every_default_is_within_its_bounds() -> None:
    cfg = Config(command="rl")
    for key in numeric_keys():
        value = functools.reduce(getattr, key.split("."), cfg)
        if value is not None:
            Config.model_validate(
                functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value) | {"command": "rl"}
            )


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("sft", ["--set", "train.optim.lr=1e30"], "train.optim.lr = 1e+30 (--set): Input should be less than or equal"),
        ("rl", ["--set", "train.optim.lr=inf"], "train.optim.lr = inf (--set): Input should be a finite number"),
        ("prefer", ["--set", "train.optim.betas=[2,3]"], "train.optim.betas = 2 (--set): Input should be less than 1"),
        ("sft", ["--set", "train.optim.eps=-1"], "train.optim.eps = -1 (--set): Input should be greater than"),
        ("generate", ["--seed", "-1"], "run.seed = -1 (flag --seed): Input should be greater than or equal to 0"),
        ("eval", ["x.parquet", "--seed", "-1"], "run.seed = -1 (flag --seed)"),
    ],
)
def test_the_commands_refuse_them(command: str, args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [command, *args])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "hint: the default of " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["prep arith", "quickstart"])
def test_seeds_outside_the_config_have_the_same_bound(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--seed", "-1"])
    assert done.exit_code == 2
    assert "greater than or equal to 0" in " ".join(done.stderr.split())
