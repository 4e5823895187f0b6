"""Writing rollout files while a run goes on: which files there are, and that no failure is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from posttrain.core.errors import DataError, DeadlineError, RunError
from posttrain.rollout.advantage_files import advantages_file, read_advantages
from posttrain.rollout.files import RolloutFiles
from posttrain.rollout.writer import RolloutWriter
from tests.helpers.recorded import TOKENIZER, VOCABULARY, assert_same, trajectory

GROUPS = [[trajectory(0, 1.0), trajectory(0, 0.0)], [trajectory(1, error="gone")]]


def writer(folder: Path, every: int = 1, deadline_s: float = 30.0) -> RolloutWriter:
    return RolloutWriter(folder, every, TOKENIZER, deadline_s)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


async def test_a_file_a_step(tmp_path: Path) -> None:
    async with writer(tmp_path / "rollouts") as rollouts:
        for step in (1, 2):
            await rollouts.write(step, GROUPS, temperature=0.7)
        await rollouts.write(2, GROUPS[:1], temperature=0.0, kind="val")
    assert names(tmp_path / "rollouts") == ["step_000001.parquet", "step_000002.parquet", "val_000002.parquet"]
    found = RolloutFiles(str(tmp_path), vocabulary=VOCABULARY, tokenizer=TOKENIZER)
    assert found.temperatures == {0.7}
    assert_same(found.read(2), GROUPS)
    found = RolloutFiles(str(tmp_path), vocabulary=VOCABULARY, tokenizer=TOKENIZER, kind="val")
    assert_same(found.read(2), GROUPS[:1])


async def test_advantages_are_beside_the_file_of_their_step(tmp_path: Path) -> None:
    trained = trajectory(0, 1.0, advantages=np.float32([0, 0, 0, 0.5, 0.5, 0.5]))
    groups = [[trajectory(0, error="gone"), trained], [trajectory(1)]]
    async with writer(tmp_path, every=2) as rollouts:
        for step in (1, 2):
            await rollouts.write(step, groups, temperature=1.0)
            await rollouts.write_advantages(step, groups)
    assert names(tmp_path) == ["step_000002.advantages.arrow", "step_000002.parquet"]
    (found,) = read_advantages(advantages_file(rollouts.path(2))).items()
    assert found[0] == 1
    assert np.array_equal(found[1], [0, 0, 0, 0.5, 0.5, 0.5])
    assert RolloutFiles(str(tmp_path), vocabulary=VOCABULARY, tokenizer=TOKENIZER).steps == [2]
    advantages_file(rollouts.path(2)).write_bytes(b"ARROW1 no")
    with pytest.raises(DataError, match=r"step_000002\.advantages\.arrow: unreadable"):
        read_advantages(advantages_file(rollouts.path(2)))
    rollouts.drop_after(1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("every", "written"), [(0, []), (2, [2, 4]), (3, [3])])
async def test_every_so_many_steps(tmp_path: Path, every: int, written: list[int]) -> None:
    async with writer(tmp_path / "rollouts", every) as rollouts:
        for step in range(1, 6):
            await rollouts.write(step, GROUPS, temperature=1.0)
    assert names(tmp_path / "rollouts") == [f"step_{step:06}.parquet" for step in written]


async def test_nothing_to_write_is_no_file(tmp_path: Path) -> None:
    async with writer(tmp_path / "rollouts") as rollouts:
        await rollouts.write(1, [], temperature=1.0)
        await rollouts.write(2, [[]], temperature=1.0)
    assert names(tmp_path / "rollouts") == []


async def test_a_failure_comes_out_at_the_next_file(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    rollouts = writer(tmp_path / "rollouts")
    await rollouts.write(1, GROUPS, temperature=1.0)
    with pytest.raises(RunError, match=r"step_000001\.parquet: a file is in the way") as error:
        await rollouts.write(2, GROUPS, temperature=1.0)
    assert str(error.value.hint) == "choose another name; run.rollouts_every writes less"


async def test_a_failure_comes_out_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("")
    with pytest.raises(RunError, match=r"step_000001\.parquet: a file is in the way"):
        async with writer(tmp_path / "rollouts") as rollouts:
            await rollouts.write(1, GROUPS, temperature=1.0)


async def test_a_failure_does_not_hide_the_one_that_ended_the_run(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("")
    with pytest.raises(RunError, match="worker 1 died") as error:
        async with writer(tmp_path / "rollouts") as rollouts:
            await rollouts.write(1, GROUPS, temperature=1.0)
            raise RunError("worker 1 died")
    assert "step_000001.parquet: a file is in the way" in error.value.__notes__[0]


async def test_a_file_that_takes_too_long_is_named(tmp_path: Path) -> None:
    long = np.zeros(3_000_000, dtype=np.int32)
    big = trajectory(tokens=long, loss_mask=long > 0, logprobs=long.astype(np.float32), weight_version=long)
    rollouts = writer(tmp_path, deadline_s=1e-3)
    await rollouts.write(1, [[big]], temperature=1.0)
    with pytest.raises(DeadlineError, match=r"step_000001\.parquet was not written within 0\.001 s"):
        await rollouts.flush()


async def test_the_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(0, VOCABULARY, 500_000, dtype=np.int32)
    big = trajectory(tokens=long, loss_mask=long < 0, logprobs=long.astype(np.float32), weight_version=long)
    async with writer(tmp_path) as rollouts:
        await rollouts.write(1, [[big]], temperature=1.0)
        turns = 0
        while not names(tmp_path) or names(tmp_path)[0].startswith("."):
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10


def test_steps_that_will_be_written_again_are_removed(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000003", "val_000002", "val_000003", "mine", "step_x"):
        (tmp_path / f"{name}.parquet").touch()
    rollouts = writer(tmp_path)
    assert rollouts.last_step() == 3
    rollouts.drop_after(2)
    kept = ["mine", "step_000001", "step_000002", "step_x", "val_000002"]
    assert names(tmp_path) == [f"{name}.parquet" for name in kept]
    assert rollouts.last_step() == 2
    (tmp_path / "step_000001.parquet").unlink()
    assert rollouts.last_step() == 0
    writer(tmp_path / "none").drop_after(0)
