import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import ModelError, UserError
from posttrain.models.builtin import create_builtin
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource, load_model, locate
from posttrain.models.weights import load_weights
from posttrain.train import checkpoint, saver
from tests.helpers.saved import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATES = {"loader.json": {"position": 24}, "meta.json": {"step": 3, "world_size": 2}}


def write(root, step, keep=10, states=STATES):
    """A checkpoint whose shards are plain files: what the driver does with them does not depend on their content."""
    return checkpoint.commit(begun(root, step), step, states, keep)


def begun(root, step):
    folder = checkpoint.begin(root, step)
    for name in ("actor/model/__0_0.distcp", "actor/model/.metadata", "actor/optim/__0_0.distcp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{name} of step {step}".encode() * 50)
    return folder


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_commit_writes_a_manifest_of_all_files(tmp_path):
    done = write(tmp_path, 3)
    assert (done.path, done.step) == (tmp_path / "global_step_3", 3)
    assert names(tmp_path) == ["global_step_3", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step_3"
    assert done.read("loader.json") == {"position": 24}
    manifest = json.loads((done.path / "COMPLETE").read_text())
    assert manifest["step"] == 3
    assert set(manifest["files"]) == {
        "actor/model/__0_0.distcp",
        "actor/model/.metadata",
        "actor/optim/__0_0.distcp",
        "loader.json",
        "meta.json",
    }
    assert checkpoint.verify(done.path) is None


def test_killed_save_leaves_no_usable_checkpoint(tmp_path):
    write(tmp_path, 3)
    folder = checkpoint.begin(tmp_path, 6)
    (folder / "half").write_bytes(b"x")
    found, problems = checkpoint.newest(tmp_path)
    assert (found.step, problems) == (3, [])
    assert list(checkpoint.begin(tmp_path, 6).iterdir()) == []  # the leftovers are gone
    write(tmp_path, 6)
    assert names(tmp_path) == ["global_step_3", "global_step_6", "latest"]


def damage_truncated(path):
    file = path / "actor/model/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flipped(path):
    file = path / "actor/optim/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)


def damage_missing(path):
    (path / "actor/model/.metadata").unlink()


def damage_state(path):
    (path / "loader.json").write_text("{}")


def damage_unfinished(path):
    (path / "COMPLETE").unlink()


def damage_manifest(path):
    (path / "COMPLETE").write_text('{"step": 6, "fil')


def damage_manifest_shape(path):
    (path / "COMPLETE").write_text("[1, 2]")


DAMAGES = [
    (damage_truncated, r"actor/model/__0_0.distcp is damaged"),
    (damage_flipped, r"actor/optim/__0_0.distcp is damaged"),
    (damage_missing, r"actor/model/.metadata is missing"),
    (damage_state, r"loader.json is damaged"),
    (damage_unfinished, r"not complete"),
    (damage_manifest, r"COMPLETE is damaged"),
    (damage_manifest_shape, r"COMPLETE is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_run_goes_on_from_the_one_before_a_broken_one_and_whoever_names_it_is_told(tmp_path, damage, message):
    for step in (3, 6, 12):
        write(tmp_path, step)
    damage(tmp_path / "global_step_12")
    found, problems = checkpoint.newest(tmp_path)
    assert found.step == 6
    assert len(problems) == 1
    assert "global_step_12 is not usable" in problems[0]
    assert message in problems[0].replace("\\", "")
    for path in (tmp_path, tmp_path / "global_step_12"):
        with pytest.raises(UserError, match=message) as error:
            checkpoint.find(path)
        assert error.value.hint == f"the newest sound one before it is {tmp_path / 'global_step_6'}"
    write(tmp_path, 9)  # the run has gone on from there, and says so in `latest`
    assert checkpoint.find(tmp_path).step == 9


def test_rejects_folder_without_usable_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path / "no_such_folder") == (None, [])
    with pytest.raises(UserError, match="no global_step_N folder"):
        checkpoint.find(tmp_path)
    write(tmp_path, 3)
    damage_missing(tmp_path / "global_step_3")
    found, problems = checkpoint.newest(tmp_path)
    assert found is None
    assert len(problems) == 1
    with pytest.raises(UserError, match="is missing"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("said", [{"logprobs": [[-1.0], [math.nan]]}, {"scores": [math.inf]}])
def test_rejects_checkpoint_of_weights_with_nonfinite_results(tmp_path, said):
    """As versions wrote them that did not look."""
    write(tmp_path, 3, states=STATES | {checkpoint.PROBE: {"logprobs": [[-1.0], [-2.0]]}})
    broken = write(tmp_path, 6, states=STATES | {checkpoint.PROBE: said})
    assert checkpoint.verify(broken.path) == "its weights give no finite numbers (probe.json)"
    assert checkpoint.newest(tmp_path)[0].step == 3
    with pytest.raises(UserError, match="no finite numbers"):
        checkpoint.find(tmp_path)


def test_find_takes_a_run_its_checkpoints_or_one_of_them(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    write(root, 3)
    write(root, 12)
    for path in (tmp_path / "run", root, root / "global_step_12", str(root / "global_step_12")):
        assert checkpoint.find(path).step == 12
    assert checkpoint.find(root / "global_step_3").step == 3
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.find(root / "global_step_4")


def test_steps_are_numbers_not_names(tmp_path):
    for step in (9, 10, 100):
        write(tmp_path, step)
    assert checkpoint.newest(tmp_path)[0].step == 100


def test_leaves_folders_of_other_names_alone(tmp_path):
    write(tmp_path, 3)
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "global_step_3.bak")
    (tmp_path / "global_step_x").mkdir()
    assert checkpoint.newest(tmp_path)[0].step == 3
    with pytest.raises(UserError, match=r"global_step_3\.bak"):
        checkpoint.find(tmp_path / "global_step_3.bak")
    write(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["global_step_3.bak", "global_step_6", "global_step_x", "latest"]


def test_keeps_only_the_newest(tmp_path):
    for step in (2, 4, 6, 8):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["global_step_6", "global_step_8", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step_8"


def test_a_later_broken_one_does_not_push_out_the_one_just_written(tmp_path):
    """A run that goes on from step 2 because 6 is broken, and keeps one checkpoint, must keep its own."""
    write(tmp_path, 2)
    write(tmp_path, 6)
    damage_truncated(tmp_path / "global_step_6")
    done = write(tmp_path, 4, keep=1)
    assert done.path.is_dir()
    assert checkpoint.newest(tmp_path)[0].step == 4
    assert not (tmp_path / "global_step_2").exists()
    # Step 6, when the run gets there again, takes the place of the broken one.
    write(tmp_path, 6, keep=1)
    assert checkpoint.verify(tmp_path / "global_step_6") is None
    assert names(tmp_path) == ["global_step_6", "latest"]


def every_file(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two checkpoints of a real model and optimizer, under names that a test restores."""
    root = tmp_path_factory.mktemp("real")
    model = create_builtin("tiny", 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in (3, 6):
        folder = checkpoint.begin(root, step)
        save_shards(folder / "actor", model, optimizer, step)
        saver.save_random_state(folder / "actor" / "random", 0, 1)
        save_text_side(ModelSource("builtin:tiny"), folder / "actor" / "huggingface")
        checkpoint.commit(folder, step, STATES, 10)
    return root


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_detects_any_damage_to_any_file(real, data):
    """Cut, with one bit flipped, or gone; COMPLETE too. The checkpoint before it is used."""
    folder = real / "global_step_6"
    file = data.draw(st.sampled_from(every_file(folder)))
    whole = file.read_bytes()
    how = data.draw(st.sampled_from(["cut", "flip", "gone"]))
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    if how == "gone" or not whole:
        file.unlink()
    elif how == "cut":
        file.write_bytes(whole[:at])
    else:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(flipped)
    try:
        found, problems = checkpoint.newest(real)
        assert found.step == 3
        assert len(problems) == 1
        assert file.name in problems[0] or "not complete" in problems[0]
    finally:
        file.write_bytes(whole)
    assert checkpoint.newest(real)[0].step == 6


def test_rejects_checkpoint_under_another_steps_name(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "global_step_3").rename(tmp_path / "global_step_9")
    assert "it is the checkpoint of step 3" in checkpoint.newest(tmp_path)[1][0]


def test_what_is_abandoned_is_not_put_in_its_place(tmp_path):
    """Whichever of its parts the thread is at; one at its end comes to it first."""
    write(tmp_path, 3)
    for after in ("a file of the driver", "the digests"):
        wanted, folder = checkpoint.Wanted(), begun(tmp_path, 6)
        files = {
            file: checkpoint.digest(folder / file) for file in ("actor/model/__0_0.distcp", "actor/model/.metadata")
        }

        def state(file, wanted=wanted):
            file.write_bytes(b"")
            wanted.abandon()

        states = {"first.bin": state, "second.json": {}} if after == "a file of the driver" else {"last.bin": state}
        with pytest.raises(checkpoint.Abandoned):
            checkpoint.commit(folder, 6, states, 10, files, wanted)
        checkpoint.remove_unfinished(tmp_path)
        assert names(tmp_path) == ["global_step_3", "latest"]

    wanted, inside, leave = checkpoint.Wanted(), threading.Event(), threading.Event()

    def last(*_):
        with wanted.to_the_end():
            inside.set()
            leave.wait(20)
            return "done"

    with ThreadPoolExecutor(2) as pool:
        end = pool.submit(last)
        assert inside.wait(20)
        given_up = pool.submit(wanted.abandon)
        assert not given_up.done()
        leave.set()
        assert end.result(20) == "done"
        given_up.result(20)


def test_keeps_the_best(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step, keep=1)
        if step == 2:
            checkpoint.write_best(tmp_path, checkpoint.Best(2, "val/loss", 0.5))
    assert names(tmp_path) == ["best.json", "global_step_2", "global_step_6", "latest"]
    assert checkpoint.find(tmp_path / "best").step == 2
    assert checkpoint.find(tmp_path).step == 6
    checkpoint.write_best(tmp_path, checkpoint.Best(6, "val/loss", 0.4))
    write(tmp_path, 8, keep=1)
    assert names(tmp_path) == ["best.json", "global_step_6", "global_step_8", "latest"]
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(UserError, match="no best checkpoint"):
        checkpoint.find(tmp_path / "best")


# ---------------------------------------------------------------------- real shards, one process


def test_shards_hold_the_model(tmp_path):
    model = create_builtin("tiny", 3)
    save_shards(tmp_path, model, None, 0)
    assert not (tmp_path / "optim").exists()
    other = create_builtin("tiny", 4)
    load_weights(other, ModelSource("", shards=str(tmp_path / "model")), 0)
    expected = dict(model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())


def test_rejects_shards_that_lack_a_parameter(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    save_shards(tmp_path, model, None, 0)
    with pytest.raises(ModelError, match="cannot read the checkpoint shards"):
        load_weights(create_builtin("tiny", 0), ModelSource("", shards=str(tmp_path / "model")), 0)


def test_restores_optimizer_state(tmp_path):
    def train(model, optimizer, steps, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            loss = model(torch.randn(4, 3, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    model, optimizer = fresh()
    train(model, optimizer, 3, seed=1)
    save_shards(tmp_path, model, optimizer, 3)
    train(model, optimizer, 3, seed=2)
    again, its_optimizer = fresh()
    assert saver.load_shards(tmp_path, again, its_optimizer) == 3
    train(again, its_optimizer, 3, seed=2)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])


def test_an_optimizer_that_never_stepped_can_be_saved(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    save_shards(tmp_path, model, optimizer, 0)
    assert saver.load_shards(tmp_path, model, optimizer) == 0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_locate_reads_our_layout(tmp_path):
    done = write(tmp_path / "run" / "checkpoints", 3)
    shutil.rmtree(done.path / "actor" / "model")
    model = create_builtin("tiny", 3)
    save_shards(done.path / "actor", model, None, 3)
    save_text_side(ModelSource("builtin:tiny"), done.path / "actor" / "huggingface")
    for path in (done.path, done.path / "actor"):
        loaded = load_model(locate(str(path)), dtype=torch.float32)
        expected = dict(model.named_parameters())
        assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    with pytest.raises(ModelError, match="no model in"):
        locate(str(tmp_path / "run"))
    with pytest.raises(ModelError, match="not found"):
        locate(str(tmp_path / "nothing"))
