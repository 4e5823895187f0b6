"""Trajectories on disk: what comes back, and what is refused by file, row and column."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError
from posttrain.core.types import Trajectory
from posttrain.models.builtin import builtin_tokenizer
from posttrain.rollout.files import (
    COLUMNS,
    Kind,
    RolloutFiles,
    fingerprint,
    rollout_schema,
    rollouts_folder,
    write_rollouts,
)
from tests.helpers.recorded import TOKENIZER, VOCABULARY, assert_same, trajectories, trajectory

Groups = list[list[Trajectory]]


def write(path: Path, groups: Groups, step: int = 1, kind: Kind = "train", **changes: Any) -> Path:
    values: dict[str, Any] = {"temperature": 1.0, "tokenizer": TOKENIZER, **changes}
    write_rollouts(path, groups, kind=kind, step=step, **values)
    return path


def recorded(*paths: Path, kind: Kind = "train", vocabulary: int = VOCABULARY) -> RolloutFiles:
    return RolloutFiles([str(path) for path in paths], vocabulary=vocabulary, tokenizer=TOKENIZER, kind=kind)


def pairs(*rewards: float) -> Groups:
    """Groups of two."""
    return [[trajectory(i, reward), trajectory(i, -reward, length=9)] for i, reward in enumerate(rewards)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(trajectories(), min_size=1, max_size=3), min_size=1, max_size=3))
def test_reads_exactly_what_was_written(groups: Groups) -> None:
    for group in groups:  # of one prompt
        for one in group:
            one.prompt = dataclasses.replace(one.prompt, images=group[0].prompt.images)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "t.parquet", groups)
        assert_same(recorded(path).read(1), groups)


def test_keeps_text_that_utf_8_cannot_encode(tmp_path: Path) -> None:
    odd = trajectory(messages=[{"role": "user", "content": "a \udc80 b \\udc80"}], error="bad byte \udcff")
    (group,) = recorded(write(tmp_path / "t.parquet", [[odd]])).read(1)
    assert group[0].messages == odd.messages
    assert group[0].error == "bad byte \\udcff"


def test_stores_values_without_a_json_form_as_text(tmp_path: Path) -> None:
    one = trajectory()
    one.prompt.extra_info["raw"] = b"\x00"
    (group,) = recorded(write(tmp_path / "t.parquet", [[one]])).read(1)
    assert group[0].prompt.extra_info["raw"] == "b'\\x00'"


def test_arrays_can_go_into_tensors(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (group,) = recorded(write(tmp_path / "t.parquet", pairs(1.0))).read(1)
    torch.from_numpy(group[0].logprobs).add_(1.0)
    assert not recwarn.list


def test_columns_are_small_types_and_compressed(tmp_path: Path) -> None:
    file = pq.ParquetFile(write(tmp_path / "t.parquet", pairs(1.0, 2.0)))
    assert file.schema_arrow.names == list(COLUMNS)
    assert file.schema_arrow.field("tokens").type == pa.list_(pa.int32())
    assert file.schema_arrow.field("logprobs").type == pa.list_(pa.float32())
    group = file.metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_images_of_a_prompt_are_written_once_a_group(tmp_path: Path) -> None:
    groups = pairs(1.0, 2.0)
    for group in groups:
        for one in group:
            one.prompt.images.append({"bytes": b"picture"})
            one.tool_images.append({"bytes": b"part"})
    path = write(tmp_path / "t.parquet", groups)
    table = pq.read_table(path)
    assert [len(images) for images in table["images"].to_pylist()] == [1, 0, 1, 0]
    assert_same(recorded(path).read(1), groups)
    old = tmp_path / "old.parquet"
    pq.write_table(table.drop_columns(["images", "tool_images"]), old)
    assert [t.prompt.images + t.tool_images for group in recorded(old).read(1) for t in group] == [[]] * 4


# ---------------------------------------------------------------------- files and steps


def test_a_folder_a_glob_and_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {step: pairs(float(step), 0.5) for step in (3, 11, 2)}
    for step, groups in steps.items():
        write(tmp_path / "run" / "rollouts" / f"step_{step:06}.parquet", groups, step)
    write(tmp_path / "run" / "rollouts" / "val_000003.parquet", pairs(7.0), 3, "val", temperature=0.0)
    monkeypatch.chdir(tmp_path)
    for paths in (tmp_path / "run", Path("run/rollouts"), Path("run/rollouts/*.parquet")):
        found = recorded(paths)
        assert found.steps == [2, 3, 11]
        assert found.temperatures == {1.0}
        for step in found.steps:
            assert_same(found.read(step), steps[step])
    assert recorded(Path("run/rollouts/step_00001*.parquet"), Path("run/rollouts/step_000002.parquet")).steps == [2, 11]
    validation = recorded(Path("run"), kind="val")
    assert_same(validation.read(3), pairs(7.0))
    assert validation.temperatures == {0.0}


def test_one_file_of_many_steps_and_row_groups(tmp_path: Path) -> None:
    steps = {step: pairs(*map(float, range(step))) for step in (1, 2, 3)}
    tables = [pq.read_table(write(tmp_path / f"{step}", groups, step)) for step, groups in steps.items()]
    path = tmp_path / "all.parquet"
    pq.write_table(pa.concat_tables(tables), path, row_group_size=5)
    for step in (3, 1, 2):
        assert_same(recorded(path).read(step), steps[step])


def test_a_step_in_two_files(tmp_path: Path) -> None:
    files = [write(tmp_path / name, pairs(1.0), 4) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"step 4 comes twice: .*a, row 0, and .*b, row 0") as error:
        recorded(*files)
    assert "one run" in str(error.value.hint)


def test_rejects_file_rewritten_while_in_use(tmp_path: Path) -> None:
    found = recorded(write(tmp_path / "t.parquet", pairs(1.0, 2.0), 4))
    for rows, step in ((pairs(1.0), 4), (pairs(1.0, 2.0), 5)):
        write(tmp_path / "t.parquet", rows, step)
        with pytest.raises(DataError, match=r"t\.parquet: it has other rows than before"):
            found.read(4)


# ---------------------------------------------------------------------- what is refused


def test_rejects_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("no.parquet", "no such file"), ("empty", "no .parquet file"), ("x*", "no file matches")):
        with pytest.raises(DataError, match=message) as error:
            recorded(tmp_path / name)
        assert error.value.hint
    with pytest.raises(DataError, match="no such file") as error:
        recorded(tmp_path / "no.parquet")
    assert "posttrain rl" in str(error.value.hint)


def test_rejects_rollout_files_of_validation_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no episode of kind 'train'"):
        recorded(write(tmp_path / "t.parquet", pairs(1.0), kind="val"))


def test_rejects_file_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", [])
    with pytest.raises(DataError, match=r"t\.parquet: the file has no rows"):
        recorded(tmp_path / "t.parquet")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_rejects_truncated_file(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "t.parquet", pairs(1.0))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"t\.parquet: not a readable parquet file"):
        recorded(path)


def test_rejects_damaged_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [[trajectory(i, length=500) for i in range(20)]])
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(list(COLUMNS).index("tokens")).data_page_offset
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    found = recorded(path)
    with pytest.raises(DataError, match=r"t\.parquet: unreadable"):
        found.read(1)


def test_rejects_file_of_another_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: column 'kind' is missing") as error:
        recorded(tmp_path / "t.parquet")
    assert "posttrain rl" in str(error.value.hint)


def test_rejects_rollouts_of_another_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", pairs(1.0), tokenizer="another")
    with pytest.raises(DataError, match=r"t\.parquet: sampled with another tokenizer than the model's"):
        recorded(path)
    # Without the fingerprint what is left is that the ids exist.
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert_same(recorded(path).read(1), pairs(1.0))
    with pytest.raises(DataError, match=r"t\.parquet: row 1, column 'tokens': 8 is no token of the model, which has 8"):
        recorded(path, vocabulary=8).read(1)


Change = Callable[[list[Any]], list[Any]]

CHANGES: list[tuple[str, Change, str]] = [
    ("tokens", lambda v: [v[0], [-1, *v[1][1:]], *v[2:]], "row 1, column 'tokens': -1 is no token"),
    ("logprobs", lambda v: [v[0], v[1], v[2][:-1], v[3]], "row 2, column 'logprobs': 5 values for 6 tokens"),
    ("loss_mask", lambda v: [*v[:3], [*v[3], True]], "row 3, column 'loss_mask': 10 values for 9 tokens"),
    ("weight_version", lambda v: [[], *v[1:]], "row 0, column 'weight_version': 0 values for 6 tokens"),
    ("loss_mask", lambda v: [[True] * 6, *v[1:]], "row 0, column 'loss_mask': true in the prompt"),
    ("logprobs", lambda v: [v[0], [float("nan")] * 9, *v[2:]], "row 1, column 'logprobs': not finite"),
    ("reward", lambda v: [1.0, 1.0, float("inf"), 1.0], "row 2, column 'reward': not finite"),
    ("prompt_length", lambda v: [3, 3, 7, 3], "row 2, column 'prompt_length': 7 is no length"),
    ("prompt_length", lambda v: [0, 3, 3, 3], "row 0, column 'prompt_length': 0 is no length"),
    ("stop_reason", lambda v: ["stop", "stopp", "stop", "stop"], "row 1, column 'stop_reason': unknown: 'stopp'"),
    ("messages", lambda v: [*v[:3], "[{"], "row 3, column 'messages': not JSON text"),
    ("messages", lambda v: [*v[:3], '["hi"]'], "row 3, column 'messages': not a JSON list of messages"),
    ("prompt", lambda v: ["{}", *v[1:]], "row 0, column 'prompt': not a JSON list of messages"),
    ("extra_info", lambda v: ["[]", *v[1:]], "row 0, column 'extra_info': not a JSON object"),
    ("reward", lambda v: [1.0, None, 1.0, 1.0], "row 1, column 'reward': null"),
    ("tokens", lambda v: [v[0], None, *v[2:]], "row 1, column 'tokens': null"),
    ("tokens", lambda v: [[None] * 6, *v[1:]], "column 'tokens': a null among the values"),
]


@pytest.mark.parametrize(("column", "change", "message"), CHANGES, ids=[message for _, _, message in CHANGES])
def test_names_the_bad_row(tmp_path: Path, column: str, change: Change, message: str) -> None:
    path = write(tmp_path / "t.parquet", pairs(1.0, 2.0))
    table = pq.read_table(path)
    at = table.column_names.index(column)
    values = pa.array(change(table[column].to_pylist()), table.schema.field(column).type)
    pq.write_table(table.set_column(at, column, values), path)
    with pytest.raises(DataError) as error:
        recorded(path).read(1)
    assert error.value.message.startswith(f"{path}: ")
    assert message in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("column", list(COLUMNS))
def test_rejects_column_of_another_type_or_missing(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "t.parquet", pairs(1.0))
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([column]), path)
    if COLUMNS[column].required:
        with pytest.raises(DataError, match=rf"t\.parquet: column '{column}' is missing") as error:
            recorded(path)
        assert "`posttrain rl` writes what is needed" in str(error.value.hint)
    else:
        assert len(recorded(path).read(1)) == 1
    other = pa.array([b"x"] * 2)
    pq.write_table(table.set_column(table.column_names.index(column), column, other), path)
    with pytest.raises(DataError, match=rf"t\.parquet: column '{column}' is binary, and should be "):
        recorded(path)


def test_accepts_additional_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", pairs(1.0))
    table = pq.read_table(path)
    pq.write_table(table.append_column("note", pa.array(["a", "b"])).select([*reversed(list(COLUMNS)), "note"]), path)
    assert_same(recorded(path).read(1), pairs(1.0))


def test_the_schema_names_every_part_of_a_trajectory() -> None:
    schema = rollout_schema()
    assert schema.names == list(COLUMNS)
    for field in ("tokens", "weight_version"):
        assert schema.field(field).type == pa.list_(pa.int32())
    assert schema.field("step").type == pa.int32()
    assert schema.field("reward_parts").type == pa.map_(pa.string(), pa.float64())
    (group,) = [[trajectory()]]
    # Those of validation, of warnings, and of agents: branches are rows of their own.
    others = {"prompt", "advantages", "unfinished", "tool_errors", "branches", "unmatched"}
    assert set(vars(group[0])) - others <= set(COLUMNS)


def test_fingerprints() -> None:
    tokenizer = builtin_tokenizer("tiny")
    before = fingerprint(tokenizer)
    assert before == fingerprint(builtin_tokenizer("tiny"))
    tokenizer.add_tokens(["<new>"])
    assert fingerprint(tokenizer) != before


def test_many_trajectories_are_split_into_row_groups_and_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long = [
        trajectory(i, tokens=rng.integers(0, VOCABULARY, 6, dtype=np.int32), reward=float(i % 3)) for i in range(300)
    ]
    groups = [long[i : i + 4] for i in range(0, 300, 4)]
    path = write(tmp_path / "t.parquet", groups)
    pq.write_table(pq.read_table(path), path, row_group_size=7)
    assert_same(recorded(path).read(1), groups)


ADDED_FIELDS = '''
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

spec = find_spec("posttrain.core.types")
source = Path(spec.origin).read_text()
before = '    unfinished: bool = False\\n    """Its grader'
added = "".join(
    f"    {name}: {hint} = field(default=None, metadata=stored(required=False))\\n"
    for name, hint in (("notes", "list[str] | None"), ("cost", "float | None"))
)
assert source.count(before) == 1
types = sys.modules["posttrain.core.types"] = module_from_spec(spec)
exec(compile(source.replace(before, added + before), spec.origin, "exec"), types.__dict__)

from posttrain.rollout.files import RolloutFiles, write_rollouts
from posttrain.tracking.report.details import Tokens, read_shown
from posttrain.tracking.report.episodes import read_numbers
from posttrain.tracking.report.thumbnails import Thumbnails
from tests.helpers.recorded import TOKENIZER, VOCABULARY, trajectory


def read(path):
    ((found,),) = RolloutFiles(str(path), vocabulary=VOCABULARY, tokenizer=TOKENIZER).read(1)
    (shown,), problems = read_shown([read_numbers(path)], [(0, 0)], 0, {}, Tokens(), Thumbnails())
    assert not problems
    return found.notes, found.cost, shown["more"]


new, old = (Path(sys.argv[1]) / name for name in ("new.parquet", "old.parquet"))
episode = trajectory(notes=["a", "b"], cost=0.5)
write_rollouts(new, [[episode]], kind="train", step=1, temperature=1.0, tokenizer=TOKENIZER)
assert read(new) == (["a", "b"], 0.5, {"notes": '["a", "b"]', "cost": "0.5"})
assert read(old) == (None, None, {})
'''


def test_stores_reads_and_shows_a_field_that_is_declared_in_one_place(tmp_path: Path) -> None:
    """``Trajectory`` gets two more fields in its source; a file that is older than they are is read, too."""
    write(tmp_path / "old.parquet", [[trajectory()]])
    command = [sys.executable, "-c", ADDED_FIELDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_finds_the_rollout_files_of_runs_with_either_folder(tmp_path: Path) -> None:
    assert rollouts_folder(tmp_path) == tmp_path / "rollouts"
    (tmp_path / "traces").mkdir()
    assert rollouts_folder(tmp_path) == tmp_path / "traces"
