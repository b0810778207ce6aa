"""Runs that start from weights in a file."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kaitian_mpi import Task, Training
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values

pytestmark = pytest.mark.sizes(1, 3)

QUIET = {
    "global_batch_size": 12,
    "epochs": 2,
    "balance": "off",
    "log_interval": 60.0,
}


@pytest.fixture
def folder(world, tmp_path):
    """A folder that all ranks share; `tmp_path` is a rank's own."""
    return Path(gather_values(world.comm, str(tmp_path))[0])


def make_task(seed=0, size=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, size)).double()
    return Task(
        model=model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=list(torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4)),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def weights_of(task):
    return [value.tolist() for value in task.model.state_dict().values()]


def train(task, until=99, **settings):
    """Return the numbers of the steps trained."""
    numbers = []
    with Training(task, **QUIET | settings) as training:
        for step in training:
            numbers.append(step.number)
            if step.number == until:
                break
    return numbers


@pytest.mark.parametrize("name", ["start.pt", "start.safetensors"])
def test_every_rank_starts_from_a_file_that_rank_0_alone_can_read(world, tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    original, task = make_task(seed=1), make_task()
    path = tmp_path / name
    if world.rank == 0 and path.suffix == ".pt":
        torch.save(original.model.state_dict(), path)
    elif world.rank == 0:
        safetensors.save_file(original.model.state_dict(), path)
    measured = {"balance": "static", "benchmark_seconds": 0.5, "keep_all": True}
    with Training(task, init=path, **QUIET | measured):  # the benchmark, which trains, is done
        assert weights_of(task) == weights_of(original)


def test_a_run_that_is_resumed_does_not_load_the_file_again(world, folder):
    path = folder / "start.pt"
    settings = {"init": str(path), "run_dir": str(folder / "run"), "resume": "auto"}
    with pytest.raises(AgreedError, match=f"--init: found no file {path}, needed"):
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
    assert weights_of(task) == weights_of(expected)
    assert train(task := make_task(), **settings) == []  # finished
    assert weights_of(task) == weights_of(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--init: found no file .*start.pt, needed a model's weights"),
        (make_task(size=3).model.state_dict(), r"found '2.weight' of shape \(3, 8\), needed \(2"),
    ],
)
def test_all_ranks_have_the_same_error_and_no_folder_is_left(world, folder, content, message):
    if world.rank == 0 and content is not None:
        torch.save(content, folder / "start.pt")
    with pytest.raises(AgreedError, match=message):
        train(make_task(), init=str(folder / "start.pt"), run_dir=str(folder / "run"))
    assert not (folder / "run").exists()
