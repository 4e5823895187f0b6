"""What may be written where, before a command begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.files import check_new, refuse_inputs


def test_an_output_is_none_of_the_inputs_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    read = tmp_path / "folder" / "read.parquet"
    read.write_text("kept")
    (tmp_path / "link.parquet").symlink_to(read)
    (tmp_path / "way").symlink_to(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    same = (read, "folder/read.parquet", "folder/../folder/read.parquet", "link.parquet", "way/read.parquet", "folder")
    for out in same:
        with pytest.raises(ConfigError, match="would replace") as refused:
            refuse_inputs(out, "--out", ["other.parquet", "folder/read.parquet"])
        assert refused.value.hint == "give another --out"
    with pytest.raises(ConfigError, match=r"would replace link\.parquet"):
        refuse_inputs(read, "--out", ["link.parquet"])
    refuse_inputs("folder/read.parquet.new", "--out", [read, tmp_path / "folder"])


def test_a_file_that_could_not_be_made_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "x.json", tmp_path / "file" / "deeper" / "x.json"):
        with pytest.raises(ConfigError, match=r"x\.json: a part of the path is not a folder") as refused:
            check_new(out, "--out", overwrite=True)
        assert refused.value.hint == "choose another --out"
    check_new(tmp_path / "new" / "newer" / "x.json", "--out", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_found_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"x\.json: permission denied"):
        check_new(tmp_path / "new" / "x.json", "--out", overwrite=False)
