"""A worker's shards, written while the model goes on to change."""

import subprocess
import sys
import time

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.models.builtin import create_builtin
from posttrain.train import saver
from posttrain.train.checkpoint import digest
from posttrain.train.hostmem import pieces

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model_and_optimizer(seed):
    model = create_builtin("tiny", seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed + 1))
    optimizer.step()
    return model, optimizer


def finished(saves):
    while (files := saves.finish()) is None:
        time.sleep(0.01)
    return files


def numbers(model, optimizer):
    state = [value for of_parameter in optimizer.state.values() for value in of_parameter.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def test_saves_the_state_at_the_start_of_the_save(tmp_path):
    """Twice, in the same host memory; training changes everything as soon as ``start`` returns."""
    model, optimizer = model_and_optimizer(1)
    saves = saver.ShardSaver(60.0)
    saves.prepare(saver.shards_of(model, optimizer, 1))
    wanted = []
    for number in (1, 2):
        wanted.append(numbers(model, optimizer))
        saves.start(tmp_path / str(number), saver.shards_of(model, optimizer, number), background=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
            optimizer.step()
        files = finished(saves)
        assert files == {name: digest(tmp_path / str(number) / name) for name in files}
        assert {name.split("/")[0] for name in files} == {"model", "optim"}
    for number in (1, 2):
        again, its_optimizer = model_and_optimizer(5)
        assert saver.load_shards(tmp_path / str(number), again, its_optimizer) == number
        for tensor, expected in zip(numbers(again, its_optimizer), wanted[number - 1], strict=True):
            assert torch.equal(tensor, expected)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from posttrain.core.errors import RunError
from posttrain.models.builtin import create_builtin
from posttrain.train import saver
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
saves = saver.ShardSaver(60.0)
try:
    saves.start(Path(sys.argv[1]), saver.shards_of(create_builtin("tiny", 0), None, 1), background=False)
except RunError as error:
    print(error)
"""


@pytest.mark.slow
def test_reports_a_full_disk(tmp_path):
    """Files end at 40 kB here. torch's own writer would drop what its threads could not write, and say nothing."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {tmp_path}: the file would be larger than is allowed\nhint: ")


def test_reports_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    saves = saver.ShardSaver(60.0)
    saves.start(tmp_path / "file", saver.shards_of(create_builtin("tiny", 0), None, 1), background=True)
    with pytest.raises(ConfigError, match=r"cannot write .*/file: a part of the path is not a folder"):
        finished(saves)


def test_restores_the_random_state(tmp_path):
    torch.manual_seed(7)
    torch.rand(3)
    saver.save_random_state(tmp_path, rank=1, world_size=2)
    wanted = torch.rand(5)
    torch.manual_seed(0)
    saver.load_random_state(tmp_path, rank=1, world_size=2)
    assert torch.equal(torch.rand(5), wanted)
    torch.manual_seed(0)
    expected = torch.rand(5)
    torch.manual_seed(0)
    saver.load_random_state(tmp_path, rank=1, world_size=4)  # another number of workers: nothing is known of them
    assert torch.equal(torch.rand(5), expected)


def test_splits_host_memory_into_aligned_pieces():
    first, nothing, last = pieces([5, 0, 70], pinned=False)
    assert [len(piece) for piece in (first, nothing, last)] == [5, 0, 70]
    first.fill_(1)
    assert not last.any()
    assert last.data_ptr() - first.data_ptr() == 64
