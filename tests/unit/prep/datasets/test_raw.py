import csv
import gzip
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.prep.datasets.raw import FORMATS, download, read_raw, split_files

ROWS = [{"a": "1", "b": "zwei\nZeilen, ü"}, {"a": "", "b": '"x"'}]
SPLITS = {"train": ("train", "train-*", "data/train-*"), "test": ("test", "test-*", "data/test-*")}


def encoded(kind: str, rows: list[dict[str, str]]) -> bytes:
    match kind:
        case ".jsonl":
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        case ".json":
            return json.dumps(rows, ensure_ascii=False, indent=1).encode()
        case ".csv":
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
            return text.getvalue().encode()
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def file_of(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, kind, zipped):
    data = encoded(kind, ROWS)
    name = f"train{kind}" + (".gz" if zipped else "")
    path = file_of(tmp_path, name, gzip.compress(data) if zipped else data)
    assert list(read_raw([path])) == ROWS
    assert list(read_raw([path, path])) == ROWS * 2
    assert split_files(str(tmp_path), SPLITS) == {"train": [path]}


def test_a_byte_order_mark_and_blank_lines_are_skipped(tmp_path):
    for kind in (".jsonl", ".json", ".csv"):
        path = file_of(tmp_path, f"a{kind}", b"\xef\xbb\xbf" + encoded(kind, ROWS))
        assert list(read_raw([path])) == ROWS
    lines = encoded(".jsonl", ROWS).replace(b"\n", b"\r\n\r\n")
    assert list(read_raw([file_of(tmp_path, "b.jsonl", lines)])) == ROWS


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ('{"keywords": "x", "example": [{"a": 1}]}', [{"a": 1}]),
        ('{"a": 1, "choices": ["x", "y"]}', [{"a": 1, "choices": ["x", "y"]}]),
        ('{"a": [{"b": 1}], "c": [{"d": 2}]}', [{"a": [{"b": 1}], "c": [{"d": 2}]}]),
        ('{"messages": [{"role": "user"}]}', [{"messages": [{"role": "user"}]}]),
        ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
    ],
)
def test_shapes_of_json(tmp_path, text, rows):
    assert list(read_raw([file_of(tmp_path, "a.json", text)])) == rows


def test_jsonl_is_read_as_it_is_asked_for(tmp_path):
    path = file_of(tmp_path, "a.jsonl", '{"a": 1}\nbroken\n')
    rows = read_raw([path])
    assert next(rows) == {"a": 1}
    with pytest.raises(DataError, match="line 2"):
        next(rows)


PARQUET = encoded(".parquet", ROWS * 1000)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", "", "the file has no rows"),
        ("a.jsonl", "\n\n", "the file has no rows"),
        ("a.json", "", "the file has no rows"),
        ("a.json", "[]", "the file has no rows"),
        ("a.csv", "a,b\n", "the file has no rows"),
        ("a.parquet", encoded(".parquet", [{"a": "1"}])[:0], "not a readable parquet file"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("a.jsonl", '{"a": 1}\n3\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is unreadable: not UTF-8"),
        ("a.jsonl", '{"a": "\\ud800"}\n', "line 1 has a character that UTF-8 cannot hold"),
        ("a.jsonl", "[" * 200_000, "line 1 is not JSON"),
        ("a.json", '[{"a": 1},\n{"a": ', "line 2 is not JSON"),
        ("a.json", '[{"a": 1}, 3]', "element 1 is not a JSON object"),
        ("a.json", "3", "element 0 is not a JSON object"),
        ("a.json", b'[\n{"a": "\xe4"}]', "line 2 is unreadable: not UTF-8"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3 has another number of fields"),
        ("a.csv", "a,b\n1\n", "line 2 has another number of fields"),
        ("a.csv", 'a,b\n"1,2\n', "line 2 is not CSV"),
        ("a.csv", "a,b,a\n1,2,3\n", "the header has the column 'a' twice"),
        ("a.csv", b"a,b\n1,\xff\n", "line 2 is unreadable: not UTF-8"),
        ("a.parquet", PARQUET[:-100], "not a readable parquet file"),
        ("a.parquet", PARQUET[:30] + b"\0" * 30 + PARQUET[60:], "not a readable parquet file"),
        ("a.parquet.gz", gzip.compress(PARQUET, mtime=0)[:-20], "not a readable parquet file"),
        ("a.jsonl.gz", gzip.compress(encoded(".jsonl", ROWS * 100), mtime=0)[:-20], "unreadable"),
        ("a.jsonl.gz", "not zipped", "unreadable"),
        ("a.txt", "x", "unknown format"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path, name, data, message):
    path = file_of(tmp_path, name, data)
    with pytest.raises(DataError, match=re.escape(message)) as error:
        list(read_raw([path]))
    assert error.value.message.startswith(f"{path}: ")
    assert error.value.hint


def test_text_in_parquet_that_is_not_utf8(tmp_path):
    column = pa.array([b"good", b"\xff"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_raw([tmp_path / "a.parquet"]))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    assert list(read_raw([file_of(tmp_path, "a.jsonl", '{"a": "\\ud83d\\ude00"}')])) == [{"a": "\N{GRINNING FACE}"}]


def test_files_of_a_folder(tmp_path):
    for name in (
        "train-0.jsonl",
        "train-1.jsonl",
        "data/train-0.parquet",
        "test.json",
        "test.csv",
        "train.backup.jsonl",
    ):
        file_of(tmp_path, name, "x")
    found = split_files(str(tmp_path), SPLITS)
    # The first pattern that matches, all of its files; of one name in two formats only one.
    assert {split: [file.name for file in files] for split, files in found.items()} == {
        "train": ["train-0.jsonl", "train-1.jsonl"],
        "test": ["test.json"],
    }


@pytest.mark.parametrize("name", ["chat_test.jsonl", "chat-dev.parquet", "Eval.json.gz", "x.validation.jsonl"])
def test_a_file_for_evaluation_is_not_read_with_the_others_of_a_folder(tmp_path, name):
    patterns = {"train": ("train", "*")}
    held = file_of(tmp_path, name, "x")
    assert split_files(str(tmp_path), patterns) == {"train": [held]}
    other = file_of(tmp_path, "contest.jsonl", "x")
    with pytest.raises(DataError, match=f"{name} is for evaluation") as error:
        split_files(str(tmp_path), patterns)
    assert "--source" in error.value.hint
    assert split_files(str(tmp_path / "c*t.jsonl"), patterns)["train"][-1] == other
    train = file_of(tmp_path, "train.jsonl", "x")
    assert split_files(str(tmp_path), patterns) == {"train": [train]}


def test_cards_that_prep_wrote_are_no_data(tmp_path):
    for name in ("sft_train.parquet", "sft_train.parquet.card.json", "my.json"):
        file_of(tmp_path, name, "x")
    for source in (tmp_path, tmp_path / "*"):
        found = split_files(str(source), {"train": ("train", "*")})
        assert found == {"train": [tmp_path / "my.json", tmp_path / "sft_train.parquet"]}


def test_patterns_that_belong_together(tmp_path):
    for name in ("b.json", "a.jsonl", "c.jsonl"):
        file_of(tmp_path, name, "x")
    assert split_files(str(tmp_path), {"test": ("a|b",)}) == {"test": [tmp_path / "a.jsonl", tmp_path / "b.json"]}


def test_a_file_or_a_glob_says_its_split_by_name(tmp_path):
    names = ("train-0.jsonl", "train-1.jsonl", "my_test_set.jsonl.gz", "other.jsonl")
    train, more, test, other = (file_of(tmp_path, name, "x") for name in names)
    assert split_files(str(train), SPLITS) == {"train": [train]}
    assert split_files(str(test), SPLITS) == {"test": [test]}
    assert split_files(str(tmp_path / "train-*.jsonl"), SPLITS) == {"train": [train, more]}
    assert split_files(str(tmp_path / "*t*[0t]*"), SPLITS) == {"train": [train], "test": [test]}
    assert split_files(str(other), {"test": ("x",)}) == {"test": [other]}
    both = {"train": ("other",), "test": ("other",)}
    assert split_files(str(other), both) == {"train": [other], "test": [other]}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "no such file or folder"),
        ("nowhere-*.jsonl", "no such file or folder"),
        ("", "holds neither train.jsonl nor train.parquet"),
        ("other.jsonl", "its name says neither split nor format"),
        ("train.txt", "its name says neither split nor format"),
    ],
)
def test_sources_without_data(tmp_path, source, message):
    file_of(tmp_path, "other.jsonl", "x")
    file_of(tmp_path, "train.txt", "x")
    with pytest.raises(DataError, match=message) as error:
        split_files(str(tmp_path / source), SPLITS)
    assert error.value.hint


def test_no_hub(monkeypatch, tmp_path):
    # A port on which nothing listens stands for the missing network; the hub client itself is the real one.
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"nobody/nothing cannot be fetched from the hub") as error:
        download("nobody/nothing", ["*.parquet"])
    assert "--source" in (error.value.hint or "")
