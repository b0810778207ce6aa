"""Loops over `Training.epochs`: with what a script does between epochs, as in one process."""

import copy
import itertools

import pytest
import torch
from samples import (
    ALSO_ALONE,
    BATCH,
    CLOSED_AND_ALSO_OPEN,
    EPOCHS,
    LENGTH,
    OPEN_AND_ALSO_CLOSED,
    QUIET,
    STEPS,
    change_shares,
    points,
    squares,
)
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from kaitian_mpi import Task, Training
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.membership import RankLoss

pytestmark = pytest.mark.sizes(3)


def sum_of_squares(model, batch):
    return {"loss": functional.mse_loss(model(batch[0]), batch[1], reduction="sum")}


class Script:
    """What a script makes before it trains: a model, two optimizers, a scheduler, an average."""

    def __init__(self):
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizers = [
            AdamW(self.model[0].parameters(), lr=0.02),
            SGD(self.model[2].parameters(), lr=0.05, momentum=0.9),
        ]
        self.scheduler = ExponentialLR(self.optimizers[0], 0.5)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def task(self, is_open, **parts):
        usual = {
            "model": self.model, "optimizer": self.optimizers, "data": points(),
            "loss": None if is_open else squares, "validation": points(37),
            "metrics": sum_of_squares,
            "extra_state": {"scheduler": self.scheduler, "average": self.average, "none": None},
        }  # fmt: skip
        return Task(**{**usual, **parts})

    def found(self):
        """Return all that training changes."""
        models = self.model.parameters(), self.average.module.parameters()
        return [p.detach().clone() for p in itertools.chain(*models)]


def batches_of(epoch):
    sampler = LoadAdaptiveSampler(points(), [BATCH], 0)
    sampler.set_epoch(epoch)
    return (points()[indices] for indices in sampler)


def by_one_process(batches_of=batches_of):
    """Return the script after training in plain torch, and its evaluations."""
    script, means = Script(), []
    for epoch in range(EPOCHS):
        for batch in batches_of(epoch):
            squares(script.model, batch).backward()
            for optimizer in script.optimizers:
                optimizer.step()
            script.model.zero_grad()
            script.average.update_parameters(script.model)
        with torch.no_grad():
            means.append(squares(script.average, points(37)[:]).item())
        script.scheduler.step()
    return script, means


def steps_of(training, epoch, is_open):
    """Train an epoch in either form; yield each step that is done."""
    for one in epoch:
        if is_open:
            training.backward(squares(training.model, one))
            assert training.step()
        yield training.last_step


def evaluate_average(training, script):
    """Evaluate the averaged weights, put in the place of the model's."""
    own = copy.deepcopy(script.model.state_dict())
    script.model.load_state_dict(script.average.module.state_dict())
    means = training.evaluate()
    script.model.load_state_dict(own)
    return means["loss"]


def train(world, is_open=False, until=None, leave_at=None, parts=None, **settings):
    """Train as `by_one_process`; return the script, its evaluations, and its steps by epoch."""
    script, means, steps = Script(), [], {}
    task = script.task(is_open, **(parts or {}))
    with Training(task, **{**QUIET, **settings}) as training:
        assert training.optimizers == script.optimizers
        for epoch in training.epochs():
            numbers = steps.setdefault(epoch.number, [])
            length = len(epoch)
            for step in steps_of(training, epoch, is_open):
                script.average.update_parameters(training.model)
                numbers.append(step.number)
                change_shares(training, world, step.number)
                if step.number == until:
                    return script, means, steps
            assert length == len(numbers)
            means.append(evaluate_average(training, script))
            script.scheduler.step()
            if epoch.number == leave_at:
                break
    assert training.summary.finished == (leave_at is None)
    return script, means, steps


def check_same(world, script, expected):
    for tensor, other in zip(script.found(), expected.found(), strict=True):
        assert torch.allclose(tensor, other, rtol=1e-12, atol=1e-14)
    values = [tensor.tolist() for tensor in script.found()]
    assert gather_values(world.comm, values) == [values] * world.size
    assert script.scheduler.get_last_lr() == expected.scheduler.get_last_lr()


@ALSO_ALONE
@pytest.mark.thorough(1)
@CLOSED_AND_ALSO_OPEN
def test_epochs_with_what_is_between_equal_those_of_one_process(world, is_open):
    expected, expected_means = by_one_process()
    script, means, steps = train(world, is_open)
    check_same(world, script, expected)
    assert means == pytest.approx(expected_means, rel=1e-12)
    numbers = list(range(1, EPOCHS * STEPS + 1))
    assert steps == {e: numbers[e * STEPS : (e + 1) * STEPS] for e in range(EPOCHS)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("is_open", "end", "last"),
    [
        (False, {"until": 10}, [10]),
        (True, {"until": 10}, [10]),
        (True, {"leave_at": 0}, [STEPS]),
        # After that of step 8, or the one before if that was still being written.
        (False, {"until": 10, "checkpoint_every": 8}, [STEPS, 8]),
        (True, {"until": 10, "checkpoint_every": 8}, [STEPS, 8]),
    ],
)
def test_epochs_are_resumed_with_what_the_script_has_done(world, shared_path, is_open, end, last):
    """Also from a checkpoint made after a step: it has the average that includes that step."""
    expected, expected_means = by_one_process()
    settings = {"run_dir": str(shared_path / "run"), "resume": "auto"}
    _, before, _ = train(world, is_open, **end, **settings)
    checkpoints = shared_path / "run" / "checkpoints"
    if "checkpoint_every" in end and world.rank == 0:
        for newer in checkpoints.glob("step-00000010*"):
            newer.unlink()
    world.comm.Barrier()
    done = max(int(path.stem[5:13]) for path in checkpoints.glob("step-*.pt"))
    assert done in last
    script, means, steps = train(world, is_open, **settings)
    check_same(world, script, expected)
    assert before + means == pytest.approx(expected_means, rel=1e-12)
    assert list(itertools.chain(*steps.values())) == list(range(done + 1, EPOCHS * STEPS + 1))


@CLOSED_AND_ALSO_OPEN
def test_a_signal_in_the_engines_evaluation_does_not_repeat_what_is_between(
    world, shared_path, is_open
):
    """The schedule, which the script has stepped by then, is stepped once."""
    expected, _ = by_one_process()
    settings = {**QUIET, "run_dir": str(shared_path / "run"), "resume": "auto"}

    def save_and_end(model, batch):
        if world.rank == 0:  # as a forked process does at a signal
            training._session.saving.exit_save.write()
        raise ZeroDivisionError

    script = Script()
    training = Training(script.task(is_open, metrics=save_and_end), **settings)
    with training, pytest.raises(ZeroDivisionError):  # noqa: PT012
        for epoch in training.epochs():
            for _ in steps_of(training, epoch, is_open):
                script.average.update_parameters(training.model)
            script.scheduler.step()
    assert training.steps_done == STEPS
    world.comm.Barrier()
    script, means, steps = train(world, is_open, **settings)
    check_same(world, script, expected)
    assert sorted(steps) == [1, 2]
    assert len(means) == 2


@pytest.mark.thorough
@OPEN_AND_ALSO_CLOSED
def test_an_epoch_that_the_last_step_has_cut_is_over_or_goes_on(world, shared_path, is_open):
    settings = {"run_dir": str(shared_path / "run"), "resume": "auto"}
    expected, _ = by_one_process()
    cut, finished = STEPS + 3, shared_path / "run" / "summary.json"
    script, _, steps = train(world, is_open, max_steps=cut, **settings)
    assert list(steps) == [0, 1]
    rates = script.scheduler.get_last_lr()
    world.comm.Barrier()
    if world.rank == 0:  # as if the job had ended before it was written
        finished.unlink()
    world.comm.Barrier()
    script, means, steps = train(world, is_open, max_steps=cut, **settings)
    assert (means, steps) == ([], {})
    assert script.scheduler.get_last_lr() == rates
    script, _, steps = train(world, is_open, **settings)
    assert steps == {1: list(range(cut + 1, 2 * STEPS + 1)), 2: list(range(15, 22))}
    for own, other in zip(script.found(), expected.found(), strict=True):
        assert own.shape == other.shape


def test_a_signal_between_epochs_has_what_is_done_there_done_again(world, shared_path):
    """Also in an epoch that an earlier job's last step had cut, and its script had ended."""
    settings = {**QUIET, "run_dir": str(shared_path / "run"), "resume": "auto"}
    train(world, max_steps=STEPS + 3, **settings)
    with Training(Script().task(is_open=False), **settings) as training:
        for epoch in training.epochs():
            assert epoch.number == 1
            assert [step.number for step in epoch] == [11, 12, 13, 14]
            if world.rank == 0:  # as a forked process does at a signal
                training._session.saving.exit_save.write()
            world.comm.Barrier()
            break
        # As if the job had ended there, before any more was saved.
        training._session.end(ZeroDivisionError())
    world.comm.Barrier()
    _, means, steps = train(world, **settings)
    assert steps == {1: [], 2: list(range(2 * STEPS + 1, 3 * STEPS + 1))}
    assert len(means) == 2


def test_what_the_script_has_evaluated_is_recorded_by_the_loop_after_a_loss():
    script, recorded = Script(), []
    with Training(script.task(is_open=False), **QUIET) as training:
        for epoch in training.epochs():
            for _ in epoch:
                script.average.update_parameters(training.model)
            recorded.append(evaluate_average(training, script))
            training._session.drop_loop()  # as the loss of another rank does
    assert training.summary.validation == {"loss": recorded[-1]}


@CLOSED_AND_ALSO_OPEN
def test_the_last_epoch_is_evaluated_once_if_the_loop_over_them_is_left_then(world, is_open):
    script = Script()
    with Training(script.task(is_open), **QUIET) as training:
        for epoch in training.epochs():
            for _ in steps_of(training, epoch, is_open):
                script.average.update_parameters(training.model)
            means = evaluate_average(training, script)
            if epoch.number == EPOCHS - 1:
                break
    assert training.summary.finished
    assert training.summary.validation == {"loss": means}


def test_what_was_due_when_a_rank_was_lost_is_saved_by_the_others(world, shared_path):
    folder, steps = shared_path / "run", []
    settings = {**QUIET, "run_dir": str(folder), "checkpoint_every": 3, "keep_checkpoints": 9}
    with Training(Script().task(is_open=False), **settings) as training:
        for step in training:
            if step.number in (3, STEPS):
                training._session.drop_loop()
                training._session.membership.losses.append(RankLoss([], 0.0, 0.0))
            if step.number in (4, STEPS + 1):
                training._session.saving._checkpoints.wait()
                world.comm.Barrier()
                steps = sorted(int(path.stem[5:13]) for path in folder.glob("checkpoints/*.json"))
                assert steps == ([3] if step.number == 4 else [3, 6, 7])
            if step.number == STEPS + 1:
                break
    assert steps == [3, 6, 7]


@OPEN_AND_ALSO_CLOSED
def test_an_epoch_whose_loop_is_left_is_over(world, is_open):
    script, steps = Script(), []
    with Training(script.task(is_open), **QUIET) as training:
        for epoch in training.epochs():
            for step in steps_of(training, epoch, is_open):
                steps.append((epoch.number, step.number))
                if len(steps) % 2 == 0:
                    break
    assert steps == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert training.summary.finished
    assert training.summary.epochs == EPOCHS


@pytest.mark.thorough
@OPEN_AND_ALSO_CLOSED
def test_rank_0_alone_evaluates_and_writes_between_steps_and_epochs(world, shared_path, is_open):
    expected, _ = by_one_process()
    script, evaluated = Script(), []
    with Training(script.task(is_open), **QUIET, step_timeout=30) as training:
        for epoch in training.epochs():
            for step in steps_of(training, epoch, is_open):
                script.average.update_parameters(training.model)
                if training.world.rank == 0 and step.number % 3 == 0:
                    torch.save(training.model.state_dict(), shared_path / f"{step.number}.pt")
            if training.world.rank == 0:
                with torch.no_grad():
                    evaluated.append(squares(script.average, points(37)[:]).item())
            script.scheduler.step()
    check_same(world, script, expected)
    if world.rank == 0:
        assert evaluated == pytest.approx(by_one_process()[1], rel=1e-12)
        assert len(list(shared_path.glob("*.pt"))) == STEPS


class Numbers(IterableDataset):
    """A stream of random samples, another in each epoch, which notes how often it is begun."""

    def __init__(self, length=LENGTH):
        self.length, self.epoch, self.begun = length, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.begun += 1
        info = get_worker_info()  # by which streams are divided among several processes
        assert info is None or info.num_workers == 1
        random = torch.Generator().manual_seed(self.epoch)
        for _ in range(self.length):
            inputs = torch.randn(5, generator=random, dtype=torch.float64)
            yield inputs, inputs[:1].sin()


OF_A_STREAM = {"data": Numbers(), "validation": Numbers()}


def batches_of_stream(epoch):
    data = Numbers()
    data.set_epoch(epoch)
    samples = list(data)
    return (default_collate(samples[first : first + BATCH]) for first in range(0, LENGTH, BATCH))


@CLOSED_AND_ALSO_OPEN
def test_a_stream_with_a_length_is_trained_in_its_order(world, is_open):
    data = Numbers()
    script, _, steps = train(world, is_open, parts={**OF_A_STREAM, "data": data})
    check_same(world, script, by_one_process(batches_of_stream)[0])
    assert list(itertools.chain(*steps.values())) == list(range(1, EPOCHS * STEPS + 1))
    assert data.begun <= EPOCHS + 2  # also to compare the ranks' data, and to try the model


@pytest.mark.thorough
def test_a_stream_is_resumed_where_it_was_and_read_by_one_process(world, shared_path):
    settings = {"run_dir": str(shared_path / "run"), "resume": "auto", "workers": 2}
    train(world, until=10, parts={"data": Numbers()}, **settings)
    script, _, steps = train(world, parts={"data": Numbers()}, **settings)
    check_same(world, script, by_one_process(batches_of_stream)[0])
    assert list(itertools.chain(*steps.values())) == list(range(11, EPOCHS * STEPS + 1))


def test_a_stream_that_ends_early_is_a_mistake(world):
    with pytest.raises(UserError, match="the data ended after 100 samples, and its length is 150"):
        train(world, parts={**OF_A_STREAM, "data": Numbers(100)})
