"""Task and Training: any model, batch, loss and optimizer, trained exactly as by one process."""

import collections
import copy
import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from samples import BATCH, LENGTH, WORDS, pad, texts
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import MetricsSink, Task, Training
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import Watchdog, current_watchdog
from kaitian_mpi.train.data.batches import Batches
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler

pytestmark = pytest.mark.sizes(3)
ALSO_ALONE = pytest.mark.sizes(1, 3)

EPOCHS = 3  # 7 steps an epoch, the last of them with 6 samples
QUIET = {
    "global_batch_size": BATCH,
    "epochs": EPOCHS,
    "balance": "off",
    "parity": False,
    "log_interval": 60.0,
    "check_every": 0,
}


class Language(nn.Module):
    """Has tied weights, a frozen layer and one that no forward uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.hidden = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.embedding.weight
        self.double()

    def logits(self, tokens):
        return self.head(self.hidden(self.frozen(self.embedding(tokens))).tanh())

    def forward(self, tokens):
        return self.logits(tokens)


def token_loss(model, batch):
    logits = model(batch["input"]).flatten(0, 1)
    return functional.cross_entropy(logits, batch["target"].flatten(), ignore_index=0)


def tokens(batch):
    return (batch["target"] != 0).sum()


def language(**parts):
    """Return a task of texts, weighted by their tokens."""
    usual = {
        "model": Language(),
        "optimizer": lambda model: AdamW(model.parameters(), lr=0.02),
        "data": texts(),
        "collate": pad,
        "loss": token_loss,
        "weight": tokens,
        "clip_norm": 0.5,
    }
    return Task(**{**usual, **parts})


def weights_of(model):
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def by_one_process(task, loss=None, batch_size=BATCH, epochs=EPOCHS, after=lambda number, m: None):
    """Return the weights after training on whole global batches, in plain torch."""
    loss = loss or task.loss
    model = copy.deepcopy(task.model)
    optimizers = task.optimizer(model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    sampler = LoadAdaptiveSampler(task.data, [batch_size], 0)
    schedulers = task.make_schedulers(optimizers, epochs * len(sampler))
    number = itertools.count(1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for indices in sampler:
            batch = Batches(task.data, task.collate)[indices]
            loss(model, batch).backward()
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            for each in (*optimizers, *schedulers):
                each.step()
            model.zero_grad()
            after(next(number), model)
    return weights_of(model)


def shares_of_step(world, step):
    """Return uneven shares that change with the step; in some of them a rank has none."""
    if world.size == 1:
        return [BATCH]
    sizes = [0, 7, BATCH - 7] + [0] * (world.size - 3) if world.size > 2 else [7, BATCH - 7]
    return sizes[step % world.size :] + sizes[: step % world.size]


def change_shares(training, world, step):
    training._loop.sampler.set_plan(shares_of_step(world, step))


def train(world, task, loss=None, uneven=True, **settings):
    """Train in the closed form, or with a loss in the open one; return what the steps were."""
    steps = []
    with Training(task, **{**QUIET, **settings}) as training:

        def done(step):
            steps.append(step)
            if uneven and step.number % 2:
                change_shares(training, world, step.number)

        if loss is None:
            for step in training:
                done(step)
        else:
            for batch in training.batches():
                with training.autocast():
                    own = loss(training.model, batch)
                training.backward(own)
                assert training.step()
                done(training.last_step)
    return steps


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def check_exact(world, task, loss=None, **settings):
    expected = by_one_process(task, loss)
    steps = train(world, task, loss, **settings)
    found = weights_of(task.model)
    assert relative(found, expected) < 1e-12
    assert gather_values(world.comm, found.tolist()) == [found.tolist()] * world.size
    assert [step.number for step in steps] == list(range(1, 22))
    assert [step.samples for step in steps] == [*[BATCH] * 6, 6] * EPOCHS
    taken = gather_values(world.comm, [step.own_samples for step in steps])
    assert [step.batch_sizes for step in steps] == [list(each) for each in zip(*taken, strict=True)]
    return steps


@ALSO_ALONE
@pytest.mark.parametrize("micro_batch_size", [0, 1, 4])
def test_token_weighted_adamw_with_clipping_is_exact(world, micro_batch_size):
    steps = check_exact(world, language(), micro_batch_size=micro_batch_size)
    assert all(step.is_finite for step in steps)
    assert steps[-1].loss < steps[0].loss


@ALSO_ALONE
def test_the_open_form_is_exact(world):
    check_exact(world, language(loss=None), token_loss)


@ALSO_ALONE
@pytest.mark.parametrize("is_open", [False, True])
def test_parameters_are_frozen_and_unfrozen_between_steps(world, folder, is_open):
    def flip(model):
        model[2].requires_grad_(True)
        model[0].bias.requires_grad_(False)

    def make():
        made = regression(
            optimizer=lambda m: AdamW(m.parameters(), lr=0.02), loss=None if is_open else squares
        )
        made.model[2].requires_grad_(False)
        return made

    def run(until, **settings):
        task = make()
        with Training(task, **{**QUIET, **settings}) as training:
            for item in training.batches() if is_open else training:
                if is_open:
                    training.backward(squares(training.model, item))
                    training.step()
                number = training.last_step.number
                if number == 5:
                    flip(training.model)
                if number == until:
                    break
                change_shares(training, world, number)
        return weights_of(task.model)

    expected = by_one_process(
        make(), squares, epochs=2, after=lambda number, model: number == 5 and flip(model)
    )
    assert relative(run(99, epochs=2), expected) < 1e-12
    run(9, epochs=2, run_dir=str(folder))
    resumed = run(99, epochs=2, run_dir=str(folder), resume="auto")  # has no step 5
    assert relative(resumed, expected) < 1e-12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"optimizer": lambda model: torch.optim.RMSprop(model.parameters())},
            "the checkpoint has the state of SGD, and the task uses RMSprop",
        ),
        ({"model": nn.Linear(5, 1).double()}, "of another model or optimizer"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(world, folder, changed, message):
    train(world, regression(), max_steps=2, run_dir=str(folder))
    with pytest.raises(UserError, match=message) as caught:
        train(world, regression(**changed), max_steps=4, run_dir=str(folder), resume="auto")
    assert "\n" not in str(caught.value)


class Experts(nn.Module):
    """Each sample uses one of three parameters."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.ones(1).double()) for _ in range(3))

    def forward(self, which):
        used = [(which == i, each) for i, each in enumerate(self.experts) if (which == i).any()]
        return sum(chosen * each for chosen, each in used)


@ALSO_ALONE
@pytest.mark.parametrize(("micro_batch_size", "is_open"), [(0, False), (1, False), (0, True)])
def test_samples_of_weight_zero_give_a_gradient_of_zero(world, micro_batch_size, is_open):
    # Adam moves a parameter with a gradient of zero, and leaves one that has none. The mean over
    # samples of weight 0 only is NaN. The first sample, the only one to use the last parameter, is
    # also what a rank without samples computes.
    samples = [(i % 2 if i else 2, float(i % 2 == 0 or i < 4)) for i in range(LENGTH)]

    def loss(model, batch):
        which, weights = batch
        return (model(which).square() * weights).sum() / weights.sum()

    task = Task(
        model=Experts(), data=samples, loss=loss, weight=lambda batch: batch[1].sum(),
        optimizer=lambda model: AdamW(model.parameters(), lr=0.02),
    )  # fmt: skip
    if is_open:
        check_exact(world, replace(task, loss=None), loss)
    else:
        check_exact(world, task, micro_batch_size=micro_batch_size)


def test_loading_processes_are_exact_and_stay_over_the_epochs(world):
    task, pids = language(), set()

    def noting(model, batch):
        pids.update(child.pid for child in multiprocessing.active_children())
        return task.loss(model, batch)

    check_exact(world, replace(task, loss=noting), workers=1)
    assert len(pids) == 1
    assert multiprocessing.active_children() == []  # they end with the run


class OfEpoch:
    """Samples that are the epoch which the dataset was told last."""

    epoch = -1

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([float(self.epoch)])

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_told_the_epoch_also_in_loading_processes(world, workers):
    seen = []

    def noting(model, batch):
        seen.append(set(batch.flatten().tolist()))
        return model(batch).square().mean()

    task = Task(
        model=nn.Linear(1, 1),
        optimizer=lambda model: SGD(model.parameters(), lr=0.01),
        data=OfEpoch(),
        loss=noting,
    )
    settings = {"global_batch_size": 12, "epochs": 3, "balance": "off", "workers": workers}
    with Training(task, **{**QUIET, **settings}) as training:
        told = [(step.epoch, seen[-1]) for step in training]
    assert told == [(epoch, {epoch}) for epoch in (0, 0, 1, 1, 2, 2)]


def test_step_loss_is_the_mean_over_the_global_batch(world):
    task = language()
    data, sampler = task.data, LoadAdaptiveSampler(task.data, [BATCH], 0)
    first = pad([data[index] for index in next(iter(sampler))])
    expected = token_loss(task.model, first).item()
    steps = train(world, task, max_steps=1)
    assert steps[0].loss == pytest.approx(expected, rel=1e-12)


def points():
    """Inputs, targets and classes."""
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 5, generator=random, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :1].sin() + inputs[:, 1:2])


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def regression(**parts):
    usual = {
        "model": network(),
        "optimizer": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        "data": points(),
        "loss": squares,
    }
    return Task(**{**usual, **parts})


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: StepLR(optimizer, 4, 0.5),
        CosineAnnealingLR,  # its second argument is the number of steps
        lambda optimizer, steps: [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps // 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        ],
        lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
    ],
    ids=["step", "cosine", "two", "one-cycle"],
)
def test_schedulers_step_once_per_step(world, scheduler):
    check_exact(world, regression(scheduler=scheduler))


@ALSO_ALONE
def test_a_scheduler_is_told_the_steps_of_the_ranks_that_train(world, monkeypatch):
    """Before that, they were counted with ranks that are spares now."""
    monkeypatch.setattr("kaitian_mpi.train.run.count_steps", lambda *_: 2)
    told = []
    task = language(scheduler=lambda o, steps: told.append(steps) or OneCycleLR(o, 0.1, steps))
    with Training(task, **QUIET) as training:
        assert sum(1 for _ in training) == told[-1] == 7 * EPOCHS
    assert told == [2, 7 * EPOCHS]


def test_several_optimizers_with_parameter_groups(world):
    def optimizers(model):
        weight, bias = model[0].weight, model[0].bias
        groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "lr": 0.01}]
        return [AdamW(groups, lr=0.02), SGD(model[2].parameters(), lr=0.05)]

    def halved(both):
        return [StepLR(each, 5, 0.5) for each in both]

    check_exact(world, regression(optimizer=optimizers, scheduler=halved, clip_norm=0.1))


def test_only_trainable_parameters_are_sent_and_unused_ones_stay(world):
    task = language()
    made = []

    def optimizer(model):
        made.append(AdamW(model.parameters(), lr=0.02))
        return made[-1]

    object.__setattr__(task, "optimizer", optimizer)
    unused, frozen = task.model.unused.weight.clone(), task.model.frozen.weight.clone()
    sent = []
    with Training(task, **{**QUIET, "max_steps": 2}) as training:
        for _ in training:
            sent += [p.shape for p in training._loop._gradients._parameters]
    assert torch.equal(task.model.unused.weight, unused)
    assert torch.equal(task.model.frozen.weight, frozen)
    state = made[-1].state
    assert task.model.hidden.weight in state
    assert not {task.model.unused.weight, task.model.frozen.weight} & set(state)
    # Embedding, tied to the head, hidden, unused and the head's bias; not the frozen layer.
    assert len(sent) == 2 * 6


class Checkpointed(Language):
    def logits(self, tokens):
        hidden = checkpoint(self.hidden, self.frozen(self.embedding(tokens)), use_reentrant=False)
        return self.head(hidden.tanh())


def test_gradient_checkpointing(world):
    check_exact(world, language(model=Checkpointed()))


def test_compiled_models(world):
    task = language(model=torch.compile(Language(), backend="eager"))
    plain = language()
    train(world, task, max_steps=5)
    train(world, plain, max_steps=5)
    assert relative(weights_of(task.model), weights_of(plain.model)) < 1e-12


@dataclass
class Record:
    inputs: torch.Tensor
    name: str
    targets: list


class Movable:
    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.moved_to = inputs, targets, None

    def to(self, device):
        self.moved_to = device
        return self


Pair = collections.namedtuple("Pair", "inputs targets")


class Named(collections.UserDict):
    """Not a dict, and has no method to move it."""


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda x, y: {"x": x, "y": [y, "text", None]}, lambda b: (b["x"], b["y"][0])),
        (lambda x, y: (x, {"y": y}), lambda b: (b[0], b[1]["y"])),
        (Pair, lambda b: (b.inputs, b.targets)),
        (lambda x, y: Record(x, "name", [y]), lambda b: (b.inputs, b.targets[0])),
        (Movable, lambda b: (b.inputs, b.targets if b.moved_to is not None else None)),
        (lambda x, y: Named(x=x, y=y), lambda b: (b.data["x"], b.data["y"])),
    ],
    ids=["dict", "tuple", "namedtuple", "dataclass", "object", "UserDict"],
)
def test_batches_of_any_structure(world, make, parts):
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        return make(torch.stack(inputs), torch.stack(targets))

    def loss(model, batch):
        return squares(model, parts(batch))

    def weight(batch):
        return len(parts(batch)[0]) if not isinstance(batch, Movable) else len(batch.inputs)

    expected, found = regression(), regression(collate=collate, loss=loss, weight=weight)
    train(world, expected, max_steps=4)
    train(world, found, max_steps=4)
    assert relative(weights_of(found.model), weights_of(expected.model)) < 1e-12


def with_norm():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_rank_without_samples_leaves_no_trace(world, is_open):
    def run(shares):
        task = regression(model=with_norm(), loss=None if is_open else squares)
        # With "auto" two runs may measure different algorithms, which sum in different orders.
        with Training(task, **{**QUIET, "max_steps": 6, "allreduce": "flat"}) as training:
            steps = training.batches() if is_open else training
            for item in steps:
                if is_open:
                    training.backward(squares(training.model, item))
                    assert training.step()
                    item = training.last_step
                training._loop.sampler.set_plan(shares)
        return weights_of(task.model)

    # The last rank's own samples never count: whatever it computes instead leaves nothing.
    by_two = run([8, 16, 0])
    again = run([8, 16, 0])
    assert by_two.tolist() == again.tolist()
    assert by_two.isfinite().all()
    assert gather_values(world.comm, by_two.tolist()) == [by_two.tolist()] * world.size


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("is_open", [False, True])
def test_other_precisions_learn(world, precision, is_open):
    model = network().float()
    data = [(x.float(), y.float()) for x, y in points()]

    def loss(model, batch):
        return functional.mse_loss(model(batch[0]).float(), batch[1])

    task = regression(
        model=model, data=data, loss=None if is_open else loss, clip_norm=1.0,
        optimizer=lambda m: [SGD(m[0].parameters(), lr=0.05), AdamW(m[2].parameters(), lr=0.01)],
    )  # fmt: skip
    steps = train(world, task, loss if is_open else None, precision=precision)
    assert sum(step.is_finite for step in steps) > 15  # fp16 begins with a scale that is too large
    first, last = (sum(step.loss for step in part) for part in (steps[:6], steps[-7:-1]))
    assert last < 0.8 * first


def held_out():
    data = points()
    return [data[index] for index in range(37)]


def sums(model, batch):
    error = (model(batch[0]) - batch[1]).square()
    return {
        "error": error.sum(),
        "largest": (error.sum(), 2 * len(error)),
        "samples": (torch.tensor(float(len(error))), 1e-9 + 0 * len(error)),
        "seen": (float(batch[0].sum()), 1.0 / 37 * len(error)),
    }


@ALSO_ALONE
@pytest.mark.parametrize("shares", [[24, 0, 0], [1, 3, 20], [8, 8, 8]])
def test_evaluation_counts_every_sample_once(world, shares):
    data = held_out()
    task = regression(validation=data, metrics=sums)
    with Training(task, **{**QUIET, "max_steps": 3}) as training:
        for step in training:
            if world.size == 3:
                training._loop.sampler.set_plan(shares)
            if step.number == 2:
                break
        found = training.evaluate()
    whole = torch.utils.data.default_collate(data)
    error = (task.model(whole[0]) - whole[1]).square().sum().item()
    assert found["error"] == pytest.approx(error / 37, rel=1e-12)
    assert found["largest"] == pytest.approx(error / 74, rel=1e-12)
    assert found["seen"] == pytest.approx(whole[0].sum().item(), rel=1e-9)
    assert gather_values(world.comm, found) == [found] * world.size


@ALSO_ALONE
def test_evaluation_without_metrics_is_the_weighted_loss(world):
    task = language(validation=texts()[:37])
    with Training(task, **{**QUIET, "max_steps": 2}) as training:
        for _ in training:
            pass
        found = training.evaluate()
    whole = pad(texts()[:37])
    assert found == {"loss": pytest.approx(token_loss(task.model, whole).item(), rel=1e-12)}


@ALSO_ALONE
def test_fewer_validation_samples_than_ranks(world):
    task = regression(validation=held_out()[:1], metrics=sums)
    with Training(task, **{**QUIET, "max_steps": 1}) as training:
        before = training.evaluate()
        for _ in training:
            assert training.model.training
    assert before["seen"] == pytest.approx(37 * held_out()[0][0].sum().item())


@pytest.fixture
def folder(world, tmp_path):
    return Path(gather_values(world.comm, str(tmp_path))[0]) / "run"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@ALSO_ALONE
def test_logged_figures_are_in_the_metrics(world, folder):
    settings = {**QUIET, "log_interval": 0.0, "max_steps": 5, "run_dir": str(folder)}
    with Training(regression(), **settings) as training:
        training.log(before=7)
        for step in training:
            training.log(number=torch.tensor(float(step.number)))
    if world.rank == 0:
        logged = [line.get("logged") for line in lines_of(folder / "metrics.jsonl")]
        assert logged == [{"before": 7}, *[{"number": float(n)} for n in range(1, 6)]]


class Collecting(MetricsSink):
    """Collects what it is given, and fails at the end."""

    def __init__(self):
        self.losses, self.kinds, self.last = [], [], None

    def on_reading(self, reading):
        self.losses.append(reading.loss)
        self.last = reading

    def on_event(self, event):
        self.kinds.append(event.kind)

    def close(self, finished):
        self.kinds.append(finished)
        raise RuntimeError("it has no room")


@ALSO_ALONE
@pytest.mark.parametrize("is_open", [False, True])
def test_a_sink_of_ones_own_gets_the_metrics_of_all_ranks(world, folder, caplog, is_open):
    task = regression(loss=None if is_open else squares, validation=held_out(), metrics=sums)
    sink, tensorboard = Collecting(), not is_open
    settings = {**QUIET, "log_interval": 0.0, "max_steps": 5, "tensorboard": tensorboard}
    train(world, task, squares if is_open else None, run_dir=str(folder), sinks=[sink], **settings)
    if world.rank != 0:
        assert sink.last is None
        return
    lines = [line for line in lines_of(folder / "metrics.jsonl") if "validation" not in line]
    assert sink.losses == [line["loss"] for line in lines]
    assert sink.kinds[:2] == ["start", "plan"]
    assert sink.kinds[-2:] == ["finish", True]
    assert "Collecting failed and receives no more metrics" in caplog.text
    last = lines[-1]
    assert last["ranks"] == list(range(world.size))
    assert (last["step"], last["total_steps"], sum(last["batch_sizes"])) == (5, 5, BATCH)
    for rank in range(world.size):
        phases = [last[f"{name}_time_sec"][rank] for name in ("forward", "backward", "optimizer")]
        assert min(phases) >= 0
        assert sum(phases) == pytest.approx(last["compute_time_sec"][rank])
    (evaluation,) = [line for line in lines_of(folder / "metrics.jsonl") if "validation" in line]
    assert set(evaluation) == {"step", "epoch", "time", "validation"}
    events = lines_of(folder / "events.jsonl")
    assert [event["kind"] for event in events] == sink.kinds[:-1]
    assert events == sorted(events, key=lambda event: event["time"])
    assert bool(list(folder.glob("tensorboard/events*"))) == tensorboard
    assert lines_of(folder / "plan.jsonl")[0]["ranks"] == last["ranks"]


class Counter:
    """Something of the user's own that belongs to the training."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@ALSO_ALONE
@pytest.mark.parametrize("is_open", [False, True])
def test_a_run_is_continued_after_a_break(world, folder, is_open):
    def make(counter):
        return language(
            loss=None if is_open else token_loss,
            validation=texts()[:9],
            metrics=lambda model, batch: {"loss": (token_loss(model, batch) * tokens(batch),
                                                   tokens(batch))},
            scheduler=CosineAnnealingLR,
            extra_state={"counter": counter},
        )  # fmt: skip

    def run(counter, until, **settings):
        task, numbers = make(counter), []
        with Training(task, **{**QUIET, **settings}) as training:
            steps = training.batches() if is_open else training
            for item in steps:
                if is_open:
                    training.backward(token_loss(training.model, item))
                    assert training.step()
                numbers.append(training.last_step.number)
                counter.seen += 1
                if numbers[-1] == until:
                    break
            found = training.evaluate()
        return weights_of(task.model), numbers, found, training.summary

    expected, *_, result, _ = run(Counter(), 99)
    _, numbers, _, summary = run(Counter(), 9, run_dir=str(folder))
    assert numbers == list(range(1, 10))
    assert not summary.finished
    counter = Counter()
    found, numbers, evaluated, summary = run(
        counter, 99, run_dir=str(folder), resume="auto", micro_batch_size=0 if is_open else 5
    )
    assert numbers == list(range(10, 22))
    assert counter.seen == 21
    assert summary.finished
    assert relative(found, expected) < 1e-12
    assert evaluated["loss"] == pytest.approx(result["loss"], rel=1e-9)
    # And once more: it is finished, and its weights and results are there.
    again, numbers, evaluated_again, _ = run(Counter(), 99, run_dir=str(folder), resume="auto")
    assert numbers == []
    assert again.tolist() == found.tolist()
    assert evaluated_again == evaluated


def islice_of_each_epoch(training, is_open):
    """Loop as the script's own epochs do, never asking for more than there is."""
    steps = training.batches() if is_open else iter(training)
    for _ in range(EPOCHS):
        yield from itertools.islice(steps, 7)


def loop_per_epoch(training, is_open):
    for _ in range(EPOCHS):
        steps = training.batches() if is_open else training
        yield from itertools.islice(steps, 7)


@pytest.mark.parametrize("loop", [islice_of_each_epoch, loop_per_epoch])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_loop_that_asks_for_no_more_steps_than_there_are_finishes(world, folder, loop, is_open):
    task = language(loss=None if is_open else token_loss)
    exported = folder.with_name("model.safetensors")
    settings = {**QUIET, "run_dir": str(folder), "export": str(exported)}
    with Training(task, **settings) as training:
        for item in loop(training, is_open):
            if is_open:
                training.backward(token_loss(training.model, item))
                assert training.step()
    assert training.summary.finished
    assert training.summary.steps == 7 * EPOCHS
    assert exported.exists()


def leave_by(error, training):
    with training:
        for step in training:
            if step.number == 4:
                raise error


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), ZeroDivisionError()])
def test_an_exit_from_the_loop_saves_as_a_return_does(world, folder, error):
    training = Training(language(), **QUIET, run_dir=str(folder))
    with pytest.raises(type(error)):
        leave_by(error, training)
    assert not training.summary.finished
    if world.rank == 0:
        is_saved = (folder / "checkpoints" / "step-00000004.pt").exists()
        assert is_saved == (not isinstance(error, Exception))


@pytest.mark.parametrize(("is_open", "last"), [(False, 7), (True, 2)])
def test_ranks_wait_for_one_in_the_scripts_own_code(world, monkeypatch, capfd, is_open, last):
    """As for a rank that evaluates alone, after an epoch or in it; the watchdogs know of each."""
    began_again = []
    renew = Watchdog.renew

    def record(self, phase, allowed_sec):
        began_again.append(phase)
        renew(self, phase, allowed_sec)

    monkeypatch.setattr(Watchdog, "renew", record)
    task = language(loss=None if is_open else token_loss)
    with Training(task, **QUIET, step_timeout=4) as training:
        for item in training.batches() if is_open else training:
            if is_open:
                training.backward(token_loss(training.model, item))
                assert training.step()
            if training.last_step.number == last and world.rank == 1:
                give_up = time.monotonic() + 60
                while not began_again:  # by an answer of a rank that waits
                    assert time.monotonic() < give_up
                    time.sleep(0.05)
                own = current_watchdog().phase
                assert (str(own), own.allowed_sec) == (f"the script's own code of step {last}", 80)
    assert training.summary.finished
    expected = "the sum of gradients" if is_open else "the end of the epoch"
    assert world.rank == 1 or expected in {phase.name for phase in began_again}
    said = f"s in the script's own code of step {last}: the other ranks wait for this one"
    assert (said in capfd.readouterr().err) == (world.rank == 1)


@ALSO_ALONE
def test_without_a_run_folder_nothing_is_written(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(world, regression(validation=held_out()), max_steps=2)
    assert list(tmp_path.iterdir()) == []
