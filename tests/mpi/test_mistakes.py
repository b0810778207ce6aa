"""Mistakes in a task, or in the loop over a Training: one line on every rank, and nothing stays.

Each case makes its mistake on all ranks; afterwards another Training still opens, in the next case,
and trains, in the last tests.
"""

import re
from functools import partial

import pytest
import torch
from samples import linear_task
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, IterableDataset

from kaitian_mpi import Training
from kaitian_mpi.cli.train import check_before_loading
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.observe.folder_lock import Claim
from kaitian_mpi.runtime.polling import sleeping_barrier

pytestmark = pytest.mark.sizes(2)

DATA = torch.arange(24.0).reshape(12, 2)
QUIET = {"global_batch_size": 4, "epochs": 1, "balance": "off", "log_interval": 60.0}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def make_task(**parts):
    return linear_task(2, **{"data": DATA, **parts})


def train(task=None, **settings):
    with Training(task or make_task(), **{**QUIET, **settings}) as training:
        return sum(1 for _ in training)


def in_a_task(parts):
    train(make_task(**parts))


def loop(body):
    """Run `body(training, loss)` for each batch in the open form."""
    with Training(make_task(loss=None), **QUIET) as training:
        for batch in training.batches():
            body(training, training.model(batch).square().mean())


def calls_in_a_loop(calls):
    def call(training, loss):
        for each in calls:
            training.backward(loss) if each == "b" else training.step()

    loop(call)


def with_training(body, **parts):
    with Training(make_task(**parts), **QUIET) as training:
        body(training)


def with_micro_batches(take):
    with Training(make_task(loss=None), **QUIET, micro_batch_size=1) as training:
        for parts in training.micro_batches():
            training.backward(training.model(take(parts)).square().mean())
            training.step()


def after_the_end():
    training = Training(make_task(), **QUIET)
    training.close()
    next(iter(training))


def squares(model, batch):
    return model(batch).square()


def no_dict(model, batch):
    return 1.0


OF_ANOTHER = SGD(nn.Linear(2, 3).parameters(), lr=0.1)
IN_A_TASK = {
    "data must be a dataset with __len__": {"data": Stream()},
    "data must be a dataset with __len__, and __getitem__ or": {"data": {1, 2}},
    "data has no samples; give at least 1": {"data": DATA[:0]},
    "data is a DataLoader, and Training makes the batches": {"data": DataLoader(DATA, 2)},
    "validation is a DataLoader": {"validation": DataLoader(DATA, 2)},
    "model must be a torch.nn.Module, not a function": {"model": squares},
    "no parameter of the model requires a gradient; unfreeze some": {
        "model": nn.Linear(2, 3).requires_grad_(False)
    },
    "optimizer must be a function or one or more optimizers, not a str": {"optimizer": "SGD"},
    "each parameter of an optimizer must belong to the model": {"optimizer": OF_ANOTHER},
    "parameter of an optimizer must belong to the model": {"optimizer": lambda _: OF_ANOTHER},
    "LBFGS needs a closure that recomputes the loss": {
        "optimizer": lambda model: torch.optim.LBFGS(model.parameters())
    },
    "the loss is a tensor of shape [4]; it must be a tensor of one element": {
        "loss": lambda model, batch: squares(model, batch).mean(1)
    },
    "the loss is a float; it must be a tensor of one element": {"loss": lambda model, batch: 2.0},
    "the loss has no gradient": {"loss": lambda *both: squares(*both).mean().detach()},
    "iterating over a Training requires Task(loss=...)": {"loss": None},
    "weight returned -2; return a number of at": {"weight": lambda _: -2},
    "clip_norm must be above 0, not 0": {"clip_norm": 0},
    "must have state_dict and load_state_dict": {"extra_state": {"ema": 1.0}},
    "metrics returned a float; it must return a dict": {"validation": DATA, "metrics": no_dict},
}
IN_A_LOOP = {  # what it calls: b, backward(loss); s, step()
    "call training.backward(loss) before training.step()": "s",
    "training.backward() was called twice for one batch": "bb",
    "call training.backward(loss) and training.step() for each batch": "b",
    "training.step() was called twice for one batch": "bss",
}
WITH_A_TRAINING = {
    "evaluate() requires Task(validation=...)": Training.evaluate,
    "another Training is open; call close() first": lambda _: train(),
    "training.batches() and micro_batches() are for a Task": lambda it: next(it.batches()),
    "are for a Task without a loss": lambda it: next(next(it.epochs()).micro_batches()),
    "iterate over each epoch that training.epochs() yields": lambda it: list(it.epochs()),
    "read training.has_samples in a loop over": lambda it: it.has_samples,
    "takes numbers or tensors of one element": lambda it: it.log(note="a word"),
}
CASES = {
    **{message: partial(in_a_task, parts) for message, parts in IN_A_TASK.items()},
    **{message: partial(calls_in_a_loop, calls) for message, calls in IN_A_LOOP.items()},
    **{message: partial(with_training, body) for message, body in WITH_A_TRAINING.items()},
    "takes a Task, not a Linear": lambda: train(nn.Linear(2, 3)),
    "the function returned a int; it must return a Task": lambda: (
        Training(lambda: 3, **QUIET).model
    ),
    "Training has no setting 'globalbatch'; it has allreduce, ba": lambda: train(globalbatch=4),
    "epochs must be a whole number, at least 0 and at most": lambda: train(epochs=-1),
    "epochs 0 requires max_steps": lambda: train(epochs=0),
    'batch_size has an effect with batch_policy="paper" only; give g': lambda: train(batch_size=8),
    "config is a dict and must be a": lambda: train(config={}),
    "this Training is closed; make a new one": after_the_end,
    "call training.backward(loss) for each micro-batch": lambda: with_micro_batches(list),
    "training.step() was called before the last micro-batch": lambda: with_micro_batches(next),
    "call training.step() once for each batch": lambda: with_training(Training.step, loss=None),
}


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_one_line(world, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        CASES[message]()
    assert "\n" not in str(caught.value)


def test_a_resumed_script_is_told_of_its_settings(world, shared_path, capsys):
    folder = {"run_dir": str(shared_path), "quiet": False, "progress": "none"}
    train(**folder, max_steps=1, keep_all=True)
    train(**folder, max_steps=2, resume="auto")
    train(**folder, max_steps=2, resume="auto")
    captured = capsys.readouterr()
    if world.rank == 0:
        assert "\nmax_steps changed from 1 to 2\n" in captured.out
        assert "to continue it, raise epochs or max_steps" in captured.err + captured.out
        assert " --epochs" not in captured.err, "a script has no flags"


def test_a_folder_in_which_another_job_trains_is_refused_until_that_ends(world, shared_path):
    claim = Claim(shared_path, "another job") if world.rank == 1 else None
    sleeping_barrier(world.comm)
    with pytest.raises(AgreedError, match="another job is training in it") as caught:
        train(run_dir=str(shared_path), resume="auto")
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value), "a script has no flags"
    assert list(shared_path.iterdir()) == [shared_path / ".job"], "nothing is begun"
    sleeping_barrier(world.comm)
    if claim is not None:
        claim.close()
    sleeping_barrier(world.comm)
    assert train(run_dir=str(shared_path), resume="auto") == 3
    sleeping_barrier(world.comm)  # the rank that has claimed it has ended, too
    assert not (shared_path / ".job").exists()


DIFFERING = {
    "seed": lambda rank: train(seed=rank),
    "global_batch_size": lambda rank: train(global_batch_size=4 + rank),
    "resume": lambda rank: train(resume=["auto", "a/file.pt"][rank], run_dir="a"),
    "run_dir": lambda rank: train(run_dir=["", "a/folder"][rank]),
    "the optimizer": lambda rank: with_optimizer(SGD, lr=1.0 + rank),
    "optimizer": lambda rank: with_optimizer([SGD, Adam][rank], lr=0.1),
    "Task(weight=...)": lambda rank: train(make_task(weight=[None, len][rank])),
    "Task(clip_norm=...)": lambda rank: train(make_task(clip_norm=1.0 + rank)),
    "the dataset": lambda rank: train(make_task(data=DATA[rank:])),
    "the model": lambda rank: train(make_task(model=nn.Linear(2, 3 + rank))),
}


def with_optimizer(kind, lr):
    train(make_task(optimizer=lambda model: kind(model.parameters(), lr=lr)))


@pytest.mark.parametrize("name", DIFFERING)
def test_what_differs_between_ranks_is_named_with_them(world, name):
    with pytest.raises(AgreedError) as caught:
        DIFFERING[name](world.rank)
    text = str(caught.value)
    assert re.search(rf"{re.escape(name)} differs between ranks: .+ on rank 0, .+ on rank 1", text)
    assert "\n" not in text


def test_flags_of_a_command_are_compared_before_torch_is_loaded(world):
    def of(**flags):
        return TrainConfig(task="a:b", set={"lr": 0.1, **flags})

    message = "--set wd differs between ranks: 0 on rank 0, 1 on rank 1"
    with pytest.raises(AgreedError, match=message):
        check_before_loading(of(wd=world.rank), world.comm)
    with pytest.raises(AgreedError, match="--set differs between ranks: lr on rank 0, lr, wd on"):
        check_before_loading(of(**({"wd": 1} if world.rank else {})), world.comm)
    check_before_loading(of(files=f"/host{world.rank}"), world.comm)


def test_devices_memory_and_what_is_shown_may_differ(world):
    own = {"workers": world.rank, "quiet": world.rank == 1, "relay_memory_mb": 8 + world.rank}
    own |= {"micro_batch_size": 1 + world.rank, "progress": ["none", "plain"][world.rank]}
    assert train(**own) == 3


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
