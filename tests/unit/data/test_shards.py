"""Files that are named, files that are broken, and reading any part of them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.data.samples import conversation_shards
from posttrain.data.shards import ShardReader, Shards, one_file, shard_files
from tests.helpers.stream_driver import BATCH, open_stream, write


def test_files_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d", [3, 3, 3])
    (tmp_path / "d" / ".hidden.parquet").write_bytes(b"")
    (tmp_path / "d" / "notes.txt").write_text("no")
    names = [str(tmp_path / "d" / f"shard-{i}.parquet") for i in range(3)]
    assert shard_files(str(tmp_path)) == shard_files(str(tmp_path / "d")) == names
    assert shard_files(str(tmp_path / "d" / "shard-[12].parquet")) == names[1:]
    assert shard_files([names[2], str(tmp_path / "d" / "*-0.parquet")]) == [names[2], names[0]]
    assert one_file(names[1]) == names[1]
    monkeypatch.chdir(tmp_path)
    assert shard_files("d/shard-0.parquet") == ["d/shard-0.parquet"]
    with pytest.raises(DataError, match="3 files where one is read"):
        one_file("d")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("", "no training data"),
        ([], "no training data"),
        ("nothing.parquet", r"nothing\.parquet: no such file"),
        ("no-*.parquet", "no file matches"),
        (".", "no .parquet file in this folder"),
    ],
)
def test_files_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str | list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        conversation_shards(paths)
    assert error.value.hint


def test_bad_shards_are_named(tmp_path: Path) -> None:
    write(tmp_path, [30, 30])
    good, bad = (str(tmp_path / f"shard-{i}.parquet") for i in range(2))

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            conversation_shards([good, bad])
        assert bad in error.value.message
        assert error.value.hint

    whole = Path(bad).read_bytes()
    Path(bad).write_bytes(whole[: len(whole) // 2])
    refused("not a readable parquet file")
    Path(bad).write_bytes(b"")
    refused("not a readable parquet file")
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(pa.int64()))}), bad)
    refused("the file has no rows")
    pq.write_table(pa.table({"prompt": [[1]], "message": [1]}), bad)
    refused(r"column 'messages' is missing")


def test_a_page_that_is_damaged_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    table = pa.table({"messages": [[n, 5] for n in range(4000)]})
    path = tmp_path / "shard-0.parquet"
    pq.write_table(table, path, row_group_size=2000, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[middle : middle + 400] = b"\xff" * 400
    path.write_bytes(content)
    with (
        open_stream(tmp_path, 0, shuffle=False, shuffle_rows=500) as stream,
        pytest.raises(DataError, match=r"shard-0\.parquet: unreadable after row 0 of row group 1"),
    ):
        for _ in range(4000 // BATCH):
            stream.next()
    assert stream.position > 2000 - BATCH - 1


def test_text_that_is_not_utf8_names_the_row(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    broken = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"messages": broken}), tmp_path / "shard-0.parquet")
    with pytest.raises(DataError, match=r"shard-0\.parquet: row 1: text that is not UTF-8"):
        open_stream(tmp_path, 0)


def test_ranges_of_row_groups_in_any_order(tmp_path: Path) -> None:
    rows = write(tmp_path, [90, 30, 80])
    shards = Shards(sorted(map(str, tmp_path.glob("*.parquet"))), ("messages",))
    assert shards.rows == 200
    assert [shards.locate(n)[1] for n in (0, 89, 90, 119, 120)] == [0, 89, 0, 29, 0]
    reader = ShardReader(shards, 2)
    rng = random.Random(0)
    for _ in range(300):
        group = rng.randrange(len(shards.groups))
        start, stop = sorted(rng.choices(range(shards.groups[group].rows + 1), k=2))
        got = [tuple(row) for batch in reader.read(group, start, stop) for row in batch["messages"].to_pylist()]
        first = shards.groups[group].first
        assert got == rows[first + start : first + stop]
