"""A model as a plain folder, and what `--overwrite` may remove."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core.errors import DataError
from posttrain.models.builtin import create_builtin
from posttrain.models.export import check_replaceable, export
from posttrain.models.load import ModelSource
from posttrain.quickstart import is_quickstart
from posttrain.quickstart import run as quickstart

SOURCE = ModelSource("builtin:tiny")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write(file: Path, text: str = "mine") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_weights_are_written_whole_in_float32(tmp_path: Path) -> None:
    export(SOURCE, tmp_path / "deep" / "out", overwrite=False)
    written = load_file(tmp_path / "deep" / "out" / "model.safetensors")
    expected = create_builtin("tiny", 0).state_dict()
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_an_empty_folder_and_a_model_are_replaced_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DataError, match="output folder exists") as error:
        export(SOURCE, out, overwrite=False)
    assert "--overwrite" in (error.value.hint or "")
    export(SOURCE, out, overwrite=True)
    write(out / "leftover.safetensors")
    export(SOURCE, out, overwrite=True)
    assert (out / "model.safetensors").is_file()
    assert not (out / "leftover.safetensors").exists()


@pytest.mark.parametrize("config", [None, "{", "[1]", '{"name": "a web page"}'])
def test_a_folder_without_a_model_is_never_replaced(tmp_path: Path, config: str | None) -> None:
    write(tmp_path / "out" / "thesis.tex")
    if config is not None:
        write(tmp_path / "out" / "config.json", config)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"replaces the folder of a model, and .*out is not one") as error:
        export(SOURCE, tmp_path / "out", overwrite=True)
    assert "another --out" in (error.value.hint or "")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("mark", ["data/sft_train.parquet", "sft/run.json"])
def test_a_quickstart_is_known_by_what_it_writes_first(tmp_path: Path, mark: str) -> None:
    check_replaceable(tmp_path, True, "a quickstart", is_quickstart)  # empty
    write(tmp_path / "other")
    with pytest.raises(DataError, match="replaces the folder of a quickstart"):
        check_replaceable(tmp_path, True, "a quickstart", is_quickstart)
    write(tmp_path / mark)
    check_replaceable(tmp_path, True, "a quickstart", is_quickstart)


def test_quickstart_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    write(tmp_path / "home" / "data" / "precious.parquet")
    file = write(tmp_path / "file")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "home", target_is_directory=True)
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to(tmp_path / "missing")
    before = contents(tmp_path)
    for out in (tmp_path / "home", file, link, nowhere):
        for overwrite in (False, True):
            with pytest.raises(DataError):
                quickstart(0, out, as_json=False, overwrite=overwrite)
    assert contents(tmp_path) == before
    assert link.is_symlink()
    assert nowhere.is_symlink()
