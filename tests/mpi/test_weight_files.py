"""Runs that start from weights in a file, or export theirs."""

import json

import pytest
import torch
from samples import linear_task
from torch import nn

from kaitian_mpi import Training
from kaitian_mpi.errors import AgreedError, StorageError

pytestmark = pytest.mark.sizes(3)

QUIET = {"global_batch_size": 12, "epochs": 2, "balance": "off", "log_interval": 60.0}


def make_task(seed=0, size=2):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, size)
    data = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4)
    return linear_task(4, data=data, model=nn.Sequential(*layers).double())


def safetensors():
    return pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")


def weights_of(task):
    return torch.cat([value.flatten() for value in task.model.state_dict().values()]).tolist()


def train(task, until=99, after_step_5=lambda: None, **settings):
    """Return the numbers of the steps trained."""
    numbers = []
    with Training(task, **QUIET | settings) as training:
        for step in training:
            numbers.append(step.number)
            if step.number == 5:
                after_step_5()
            if step.number == until:
                break
    return numbers


@pytest.mark.parametrize("name", ["start.pt", "start.safetensors"])
def test_every_rank_starts_from_a_file_that_rank_0_alone_can_read(world, tmp_path, name):
    original, task = make_task(seed=1), make_task()
    path = tmp_path / name
    save = torch.save if path.suffix == ".pt" else safetensors().save_file
    if world.rank == 0:
        save(original.model.state_dict(), path)
    measured = {"balance": "static", "benchmark_seconds": 0.5, "keep_all": True}
    with Training(task, init=path, **QUIET | measured) as training:
        _ = training.model  # its first use: the benchmark, which trains, is done
        assert weights_of(task) == weights_of(original)


def test_a_run_that_is_resumed_does_not_load_the_file_again(world, shared_path):
    path = shared_path / "start.pt"
    settings = {"init": str(path), "run_dir": str(shared_path / "run"), "resume": "auto"}
    with pytest.raises(AgreedError, match=f"^rank 0: init {path}: No such file"):
        train(make_task(), **settings)
    if world.rank == 0:
        torch.save(make_task(seed=1).model.state_dict(), path)
    expected = make_task(seed=1)
    train(expected)
    assert train(make_task(), until=4, **settings) == [1, 2, 3, 4]  # there was no checkpoint yet
    if world.rank == 0:
        path.unlink()
    world.comm.Barrier()
    task = make_task()
    assert train(task, **settings) == [5, 6, 7, 8, 9, 10]
    # Not to the last bit: another allreduce may have been chosen.
    assert weights_of(task) == pytest.approx(weights_of(expected), rel=1e-9)
    again = make_task()
    assert train(again, **settings) == []  # finished
    assert weights_of(again) == weights_of(task)


def test_all_ranks_have_the_same_error_and_no_folder_is_left(world, shared_path):
    if world.rank == 0:
        torch.save(make_task(size=3).model.state_dict(), shared_path / "start.pt")
    with pytest.raises(AgreedError, match=r"the weights do not fit: .*size mismatch for 2\.weight"):
        train(make_task(), init=str(shared_path / "start.pt"), run_dir=str(shared_path / "run"))
    assert not (shared_path / "run").exists()


def assert_has_weights(path, task):
    found, expected = safetensors().load_file(path), task.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def target(shared_path):
    safetensors()
    return shared_path / "model.safetensors"


def test_weights_are_exported_once_the_training_is_finished(world, target):
    task = make_task()
    train(task, until=3, export=target)
    assert not target.exists()  # it was left early
    assert train(task, export=target) == list(range(1, 11))
    assert_has_weights(target, task)
    # What was exported may be where the next one starts, and is then replaced.
    before, again = weights_of(task), make_task(seed=2)
    with Training(again, **QUIET, init=target, export=str(target)) as training:
        _ = training.model  # its first use loads the file
        assert weights_of(again) == before
        for _ in training:
            pass
    assert weights_of(again) != before
    assert_has_weights(target, again)


def test_a_finished_run_exports_its_weights_when_it_is_called_again(world, shared_path, target):
    settings = {"run_dir": str(shared_path / "run"), "resume": "auto"}
    inside = shared_path / "run/model.safetensors"  # the folder does not exist yet
    train(make_task(), **settings, export=inside)
    task = make_task()
    assert train(task, **settings, export=target) == []
    assert_has_weights(inside, task)
    assert target.read_bytes() == inside.read_bytes()


def test_a_run_is_not_finished_before_its_weights_are_exported(world, shared_path, target):
    there = shared_path / "to"
    path = there / "m.safetensors"
    settings = {"run_dir": str(shared_path / "run"), "resume": "auto", "export": path}

    def replace_folder_by_file():
        if world.rank == 0:
            there.rmdir()
            there.touch()

    there.mkdir(exist_ok=True)
    task = make_task()
    message = (
        r"training is done, but .*m\.safetensors could not be written: .*; step 10 is in its "
        r'checkpoint: make room, and run the same command with run_dir .* resume="auto"'
    )
    with pytest.raises(AgreedError, match=message) as caught:
        train(task, after_step_5=replace_folder_by_file, **settings)
    assert caught.value.exit_code == StorageError.exit_code
    assert not json.loads((shared_path / "run/summary.json").read_text())["finished"]
    world.comm.Barrier()
    if world.rank == 0:
        there.unlink()
        there.mkdir()
    world.comm.Barrier()
    again = make_task()
    assert train(again, **settings) == []  # nothing is trained again
    assert_has_weights(path, again)
    assert weights_of(again) == weights_of(task)
    assert json.loads((shared_path / "run/summary.json").read_text())["finished"]
