"""Mistakes in a task, or in the loop over a Training: one line on every rank, and nothing stays.

Each case makes its mistake on all ranks; afterwards a Training still opens and trains.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import IterableDataset

from kaitian_mpi import Task, Training
from kaitian_mpi.cli.train import check_before_loading
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.folder_lock import Claim
from kaitian_mpi.runtime.polling import sleeping_barrier

pytestmark = pytest.mark.sizes(2)

DATA = torch.arange(24.0).reshape(12, 2)
QUIET = {"global_batch_size": 4, "epochs": 1, "balance": "off", "log_interval": 60.0}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def make_task(**parts):
    usual = {
        "model": nn.Linear(2, 3),
        "optimizer": lambda model: SGD(model.parameters(), lr=0.01),
        "data": DATA,
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    return Task(**{**usual, **parts})


def train(**parts):
    with Training(make_task(**parts), **QUIET) as training:
        return sum(1 for _ in training)


def set_to(**settings):
    with Training(make_task(), **{**QUIET, **settings}) as training:
        return sum(1 for _ in training)


def loop(body):
    """Run `body(training, loss)` for each batch in the open form."""
    with Training(make_task(loss=None), **QUIET) as training:
        for batch in training.batches():
            body(training, training.model(batch).square().mean())


def twice_backward(training, loss):
    training.backward(loss)
    training.backward(loss)


def evaluate(**parts):
    with Training(make_task(**parts), **QUIET) as training:
        training.evaluate()


def closed_training():
    training = Training(make_task(), **QUIET)
    training.close()
    return training


def two_trainings():
    with Training(make_task(), **QUIET):
        Training(make_task(), **QUIET)


def batches_of_a_task_with_a_loss():
    with Training(make_task(), **QUIET) as training:
        next(training.batches())


def steps_without_a_batch():
    with Training(make_task(loss=None), **QUIET) as training:
        training.step()


def logs_text():
    with Training(make_task(), **QUIET) as training:
        training.log(note="a word")


def of_another_model(_):
    return SGD(nn.Linear(2, 3).parameters(), lr=0.1)


def twice_the_same(model):
    return [SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.2)]


MISTAKES = {
    "a stream": (lambda: train(data=Stream()), "data must be a dataset with __len__"),
    "no sample": (lambda: train(data=DATA[:0]), "data has no samples; give at least 1"),
    "a model that is none": (
        lambda: train(model=lambda x: x),
        "model must be a torch.nn.Module, not a function",
    ),
    "a frozen model": (
        lambda: train(model=nn.Linear(2, 3).requires_grad_(False)),
        "no parameter of the model requires a gradient; unfreeze some",
    ),
    "an optimizer, not a function": (
        lambda: train(optimizer=SGD(nn.Linear(2, 3).parameters(), lr=0.1)),
        "optimizer must be a function, not a SGD",
    ),
    "an optimizer of another model": (
        lambda: train(optimizer=of_another_model),
        "each parameter of an optimizer must be one of the model",
    ),
    "a loss per sample": (
        lambda: train(loss=lambda model, batch: model(batch).square().mean(1)),
        "the loss is a tensor of shape [4]; it must be a tensor of one element",
    ),
    "a loss that is a number": (
        lambda: train(loss=lambda model, batch: model(batch).square().mean().item()),
        "the loss is a float; it must be a tensor of one element",
    ),
    "a detached loss": (
        lambda: train(loss=lambda model, batch: model(batch).square().mean().detach()),
        "the loss has no gradient",
    ),
    "a weight below 0": (
        lambda: train(weight=lambda _: -2),
        "weight returned -2; return a number of at least 0",
    ),
    "no clipping": (lambda: train(clip_norm=0), "clip_norm must be above 0, not 0"),
    "extra state without a state": (
        lambda: train(extra_state={"ema": 1.0}),
        "must have state_dict and load_state_dict",
    ),
    "metrics without names": (
        lambda: evaluate(validation=DATA, metrics=lambda model, batch: 1.0),
        "metrics returned a float; it must return a dict",
    ),
    "nothing to evaluate on": (evaluate, "evaluate() requires Task(validation=...)"),
    "no task": (
        lambda: Training(nn.Linear(2, 3), **QUIET),
        "takes a Task, not a Linear",
    ),
    "a function without a task": (
        lambda: Training(lambda: 3, **QUIET).model,
        "the function returned a int; it must return a Task",
    ),
    "an unknown setting": (
        lambda: set_to(globalbatch=4),
        "Training has no setting 'globalbatch'; it has allreduce, balance,",
    ),
    "a setting out of range": (lambda: set_to(epochs=0), "--epochs"),
    "two trainings at once": (two_trainings, "another Training is open; call close() first"),
    "a loop after the end": (
        lambda: next(iter(closed_training())),
        "this Training is closed; make a new one",
    ),
    "batches of a task with a loss": (
        batches_of_a_task_with_a_loss,
        "training.batches() is for a Task without a loss",
    ),
    "a loop over a task without a loss": (
        lambda: train(loss=None),
        "iterating over a Training requires Task(loss=...)",
    ),
    "a step without a gradient": (
        lambda: loop(lambda training, loss: training.step()),
        "call training.backward(loss) before training.step()",
    ),
    "two gradients of one batch": (
        lambda: loop(twice_backward),
        "training.backward() was called twice for one batch",
    ),
    "a batch without a step": (
        lambda: loop(lambda training, loss: training.backward(loss)),
        "call training.backward(loss) and training.step() for each batch",
    ),
    "a step without a batch": (steps_without_a_batch, "call training.step() once for each batch"),
    "two steps of one batch": (
        lambda: loop(
            lambda training, loss: (training.backward(loss), training.step(), training.step())
        ),
        "training.step() was called twice for one batch",
    ),
    "an optimizer with a closure": (
        lambda: train(optimizer=lambda model: torch.optim.LBFGS(model.parameters())),
        "LBFGS computes the loss several times a step",
    ),
    "a dict for the settings": (lambda: set_to(config={}), "config is a dict and must be a"),
    "a figure that is none": (logs_text, "takes numbers or tensors of one element"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_stays(world, mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert train() == 3


@pytest.mark.ranks(2)
def test_models_that_differ_between_ranks_are_a_mistake(world):
    with pytest.raises(UserError, match="the model differs between ranks"):
        train(model=nn.Linear(2, 3 + world.rank))
    assert train() == 3


class Extra:
    """Extra state that checkpoints cannot hold from some step on."""

    def __init__(self, until):
        self.value, self.until = 0, until

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def train_with(extra, folder):
    settings = QUIET | {"epochs": 2, "run_dir": folder, "checkpoint_every": 2}
    with Training(make_task(extra_state={"ema": extra}), **settings) as training:
        for step in training:
            if step.number >= extra.until:
                extra.value = {step.number}
        return training.summary


def test_state_that_checkpoints_cannot_hold_is_warned_of(world, tmp_path, caplog):
    folder = gather_values(world.comm, str(tmp_path))[0]
    assert train_with(Extra(until=3), f"{folder}/run").finished
    warned = "could not be written: state['extra']['ema']['value'] is a set" in caplog.text
    assert warned == (world.rank == 0)


@pytest.mark.ranks(2)
def test_a_folder_in_which_another_job_trains_is_refused_until_that_ends(world, tmp_path):
    folder = Path(gather_values(world.comm, str(tmp_path))[0])
    claim = Claim(folder, "another job") if world.rank == 1 else None
    sleeping_barrier(world.comm)
    with pytest.raises(AgreedError, match="another job is training in it") as caught:
        set_to(run_dir=str(folder), resume="auto")
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == [folder / ".job"], "nothing is begun"
    sleeping_barrier(world.comm)
    if claim is not None:
        claim.close()
    sleeping_barrier(world.comm)
    assert set_to(run_dir=str(folder), resume="auto") == 3
    assert not (folder / ".job").exists()


DIFFERING = {
    "seed": lambda rank: set_to(seed=rank),
    "global-batch-size": lambda rank: set_to(global_batch_size=4 + rank),
    "resume": lambda rank: set_to(resume=["auto", "a/file.pt"][rank], run_dir="a"),
    "run-dir": lambda rank: set_to(run_dir=["", "a/folder"][rank]),
    "the optimizer": lambda rank: train(optimizer=lambda m: SGD(m.parameters(), lr=1.0 + rank)),
    "optimizer": lambda rank: train(optimizer=lambda m: [SGD, Adam][rank](m.parameters(), lr=0.1)),
    "Task(weight=...)": lambda rank: train(weight=[None, len][rank]),
    "Task(clip_norm=...)": lambda rank: train(clip_norm=1.0 + rank),
    "the dataset": lambda rank: train(data=DATA[rank:]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DIFFERING)
def test_what_differs_between_ranks_is_named_with_them(world, name):
    with pytest.raises(AgreedError) as caught:
        DIFFERING[name](world.rank)
    text = str(caught.value)
    assert re.search(rf"{re.escape(name)} differs between ranks: .+ on rank 0, .+ on rank 1", text)
    assert "\n" not in text
    assert train() == 3


@pytest.mark.ranks(2)
def test_flags_of_a_command_are_compared_before_torch_is_loaded(world):
    def of(**flags):
        return TrainConfig(task="a:b", set={"lr": 0.1, **flags})

    message = "--set wd differs between ranks: 0 on rank 0, 1 on rank 1"
    with pytest.raises(AgreedError, match=message):
        check_before_loading(of(wd=world.rank), world.comm)
    with pytest.raises(AgreedError, match="--set differs between ranks: lr on rank 0, lr, wd on"):
        check_before_loading(of(**({"wd": 1} if world.rank else {})), world.comm)
    check_before_loading(of(files=f"/host{world.rank}"), world.comm)


@pytest.mark.ranks(2)
def test_devices_memory_and_what_is_shown_may_differ(world):
    own = {"workers": world.rank, "quiet": world.rank == 1, "relay_memory_mb": 8 + world.rank}
    assert (
        set_to(**own, micro_batch_size=1 + world.rank, progress=["none", "plain"][world.rank]) == 3
    )


def test_a_step_that_does_not_fit_says_what_can_be_done():
    def out_of_memory(training, loss):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        loop(out_of_memory)
    (note,) = raised.value.__notes__
    assert "is out of memory. Set a smaller micro_batch_size" in note

    def other(training, loss):
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted") as raised:
        loop(other)
    assert not hasattr(raised.value, "__notes__")
    assert train() == 3
