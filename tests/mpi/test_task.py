"""Task and Training: any model, batch, loss and optimizer, trained exactly as by one process."""

import collections
import copy
import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass, replace

import pytest
import torch
from choices import by_default
from jobs import read_lines, read_readings
from samples import (
    ALSO_ALONE,
    BATCH,
    CLOSED_AND_ALSO_OPEN,
    EPOCHS,
    LENGTH,
    OPEN_AND_ALSO_CLOSED,
    QUIET,
    WORDS,
    change_shares,
    pad,
    points,
    squares,
    texts,
)
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import MetricsSink, Task, Training
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import Watchdog, current_watchdog
from kaitian_mpi.train.data.batches import Batches
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler

pytestmark = pytest.mark.sizes(3)


def test_a_script_can_leave_out_what_stands_in_for_an_empty_share(world):
    data = list(points(7))
    task = Task(
        model=nn.Linear(5, 1).double(),
        data=[(*pair, index) for index, pair in enumerate(data)],
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )
    for form in ("batches", "micro_batches"):
        seen, stand_ins = [], 0
        with Training(task, **{**QUIET, "global_batch_size": 3, "epochs": 1}) as training:
            for batch in getattr(training, form)():
                for inputs, target, index in [batch] if form == "batches" else batch:
                    seen += index.tolist() * training.has_samples
                    training.backward(functional.mse_loss(training.model(inputs), target))
                    stand_ins += not training.has_samples
                training.step()
        counted = [index for rank in gather_values(world.comm, seen) for index in rank]
        assert sorted(counted) == list(range(7))
        assert sum(gather_values(world.comm, stand_ins)) == 2  # of the last step, of one sample


class Language(nn.Module):
    """Has tied weights, a frozen layer and one that no forward uses."""

    def __init__(self, checkpoints=False):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.hidden = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints
        self.double()

    def forward(self, tokens):
        inputs = self.frozen(self.embedding(tokens))
        if self.checkpoints:
            return self.head(checkpoint(self.hidden, inputs, use_reentrant=False).tanh())
        return self.head(self.hidden(inputs).tanh())


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


def regression(**parts):
    torch.manual_seed(4)
    usual = {
        "model": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        "optimizer": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        "data": points(),
        "loss": squares,
    }
    return Task(**{**usual, **parts})


class Experts(nn.Module):
    """Each sample uses one of three parameters."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.ones(1).double()) for _ in range(3))

    def forward(self, which):
        used = [(which == i, expert) for i, expert in enumerate(self.experts) if (which == i).any()]
        return sum(chosen * expert for chosen, expert in used)


def weighted_experts():
    """Return a task in which samples of weight 0 must have a gradient of zero.

    Adam moves a parameter with such a gradient, and leaves one that has none. The mean over samples
    of weight 0 only is NaN. The first sample, the only one to use the last parameter, is also what
    a rank without samples computes.
    """

    def loss(model, batch):
        which, weights = batch
        return (model(which).square() * weights).sum() / weights.sum()

    return Task(
        model=Experts(),
        data=[(i % 2 if i else 2, float(i % 2 == 0 or i < 4)) for i in range(LENGTH)],
        loss=loss,
        weight=lambda batch: batch[1].sum(),
        optimizer=lambda model: AdamW(model.parameters(), lr=0.02),
    )


def with_two_optimizers():
    def optimizers(model):
        weight, bias = model[0].weight, model[0].bias
        groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "lr": 0.01}]
        return [AdamW(groups, lr=0.02), SGD(model[2].parameters(), lr=0.05)]

    def halved(both):
        return [StepLR(optimizer, 5, 0.5) for optimizer in both]

    return regression(optimizer=optimizers, scheduler=halved, clip_norm=0.1)


def clip_values(parameters):
    nn.utils.clip_grad_value_(parameters, 0.01)


def with_two_schedulers(optimizer, steps):
    return [LinearLR(optimizer, total_iters=steps // 2), ExponentialLR(optimizer, 0.99)]


def weights_of(model):
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def by_one_process(task, epochs=EPOCHS, after=lambda number, model: None):
    """Return the weights after training on whole global batches, in plain torch."""
    model = copy.deepcopy(task.model)
    optimizers = task.optimizer(model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    sampler = LoadAdaptiveSampler(task.data, [BATCH], 0, shuffle=task.shuffle)
    schedulers = task.make_schedulers(optimizers, epochs * len(sampler))
    number = itertools.count(1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for indices in sampler:
            batch = Batches(task.data, task.collate)[indices]
            task.loss(model, batch).backward()
            if callable(task.clip_norm):
                task.clip_norm(model.parameters())
            elif task.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            for stepped in (*optimizers, *schedulers):
                stepped.step()
            model.zero_grad()
            after(next(number), model)
    return weights_of(model)


def in_form(task, is_open):
    """Return the task, and the loss that its script computes itself in the open form."""
    return (replace(task, loss=None), task.loss) if is_open else (task, None)


def steps_of(training, loss=None, is_split=False):
    """Train in the closed form, or with a loss in the open one; yield each completed step."""
    if loss is None:
        yield from training
        return
    for batch in training.micro_batches() if is_split else training.batches():
        for part in batch if is_split else [batch]:
            with training.autocast():
                part_loss = loss(training.model, part)
            training.backward(part_loss)
        assert training.step()
        yield training.last_step


def train(world, task, is_open=False, until=None, after=lambda training, step: None, **settings):
    """Train in either form with uneven shares; return what the steps were."""
    given, loss = in_form(task, is_open)
    steps = []
    with Training(given, **{**QUIET, **settings}) as training:
        for step in steps_of(training, loss, "micro_batch_size" in settings):
            steps.append(step)
            after(training, step)
            if step.number % 2:
                change_shares(training, world, step.number)
            if step.number == until:
                break
    return steps


def relative(result, expected):
    return float((result - expected).norm() / expected.norm())


def check_exact(world, task, is_open=False, epochs=2, **settings):
    expected = by_one_process(task, epochs)
    steps = train(world, task, is_open, epochs=epochs, **settings)
    weights = weights_of(task.model)
    assert relative(weights, expected) < 1e-12
    assert gather_values(world.comm, weights.tolist()) == [weights.tolist()] * world.size
    assert [step.number for step in steps] == list(range(1, 7 * epochs + 1))
    assert [step.samples for step in steps] == [*[BATCH] * 6, 6] * epochs
    taken = gather_values(world.comm, [step.rank_samples for step in steps])
    assert [step.batch_sizes for step in steps] == [
        list(sizes) for sizes in zip(*taken, strict=True)
    ]
    assert all(step.is_finite for step in steps)


TASKS = {
    "adamw by tokens, clipped": (language, {}),
    "micro-batches of 1": (language, {"micro_batch_size": 1}),
    "micro-batches of 4": (language, {"micro_batch_size": 4}),
    "open form": (language, {"is_open": True}),
    "weights of 0": (weighted_experts, {}),
    "weights of 0, micro-batches": (weighted_experts, {"micro_batch_size": 1}),
    "weights of 0, open form": (weighted_experts, {"is_open": True}),
    "open micro-batches": (language, {"is_open": True, "micro_batch_size": 4}),
    "open micro-batches of 1": (weighted_experts, {"is_open": True, "micro_batch_size": 1}),
    "in the data's order": (lambda: regression(shuffle=False), {}),
    "clipped by a function": (lambda: regression(clip_norm=clip_values), {}),
    "gradient checkpointing": (lambda: language(model=Language(checkpoints=True)), {}),
    "two optimizers with groups": (with_two_optimizers, {}),
    "a scheduler": (lambda: regression(scheduler=lambda o: StepLR(o, 4, 0.5)), {}),
    "told the steps": (lambda: regression(scheduler=CosineAnnealingLR), {}),
    "one cycle": (lambda: regression(scheduler=lambda o, n: OneCycleLR(o, 0.1, n)), {}),
    "two schedulers": (lambda: regression(scheduler=with_two_schedulers), {}),
}


FURTHER_TASKS = {
    *("micro-batches of 1", "micro-batches of 4", "open form", "open micro-batches of 1"),
    *("weights of 0", "weights of 0, open form", "in the data's order"),
    *("two schedulers", "a scheduler", "told the steps"),
    *("adamw by tokens, clipped", "gradient checkpointing"),
}


def marks_of(number, name):
    further = [pytest.mark.thorough] if name in FURTHER_TASKS else []
    return [*further, ALSO_ALONE] if number < 8 else further


@pytest.mark.parametrize(
    "name",
    [pytest.param(task_form, marks=marks_of(n, task_form)) for n, task_form in enumerate(TASKS)],
)
def test_a_training_equals_that_of_one_process(world, name):
    make, settings = TASKS[name]
    check_exact(world, make(), **settings)


@ALSO_ALONE
@pytest.mark.thorough(1)
@CLOSED_AND_ALSO_OPEN
def test_parameters_are_frozen_and_unfrozen_between_steps(world, shared_path, is_open):
    def flip(number, model):
        if number == 5:
            model[2].requires_grad_(True)
            model[0].bias.requires_grad_(False)

    def make():
        made = regression(optimizer=lambda m: AdamW(m.parameters(), lr=0.02))
        made.model[2].requires_grad_(False)
        return made

    def run(until=None, **settings):
        task, settings["epochs"] = make(), 2
        train(world, task, is_open, until, lambda t, step: flip(step.number, t.model), **settings)
        return weights_of(task.model)

    expected = by_one_process(make(), 2, flip)
    assert relative(run(), expected) < 1e-12
    run(until=9, run_dir=str(shared_path / "run"))
    resumed = run(run_dir=str(shared_path / "run"), resume="auto")  # has no step 5
    assert relative(resumed, expected) < 1e-12


def test_a_checkpoint_of_something_else_is_one_line(world, shared_path):
    settings = {"max_steps": 2, "run_dir": str(shared_path / "run")}
    train(world, regression(), **settings)
    rms = regression(optimizer=lambda model: torch.optim.RMSprop(model.parameters()))
    for task, message in (
        (rms, "the checkpoint has the state of SGD, and the task uses RMSprop"),
        (regression(model=nn.Linear(5, 1).double()), "of another model or optimizer"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(world, task, resume="auto", **settings)
        assert "\n" not in str(caught.value)


def wait_for_children():
    give_up = time.monotonic() + 60
    while multiprocessing.active_children():  # on a busy machine they are not joined, but ended
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_loading_processes_are_exact_stay_over_the_epochs_and_end_with_the_run(world):
    task, pids = language(), set()

    def noting(model, batch):
        pids.update(child.pid for child in multiprocessing.active_children())
        return task.loss(model, batch)

    wait_for_children()  # of earlier tests
    check_exact(world, replace(task, loss=noting), workers=1)
    assert len(pids) == 1
    wait_for_children()


class OfEpoch:
    """Samples that are the epoch which the dataset was told last."""

    epoch = -1

    def __len__(self):
        return BATCH

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

    task = regression(model=nn.Linear(1, 1), data=OfEpoch(), loss=noting)
    with Training(task, **{**QUIET, "global_batch_size": 12, "workers": workers}) as training:
        told = [(step.epoch, seen[-1]) for step in training]
    assert told == [(epoch, {epoch}) for epoch in (0, 0, 1, 1, 2, 2)]


@ALSO_ALONE
def test_a_scheduler_is_told_the_steps_of_the_ranks_that_train(world, monkeypatch):
    """Before that, they were counted with ranks that are spares now."""
    monkeypatch.setattr("kaitian_mpi.train.run.count_steps", lambda *_: 2)
    told = []
    task = language(scheduler=lambda o, steps: told.append(steps) or OneCycleLR(o, 0.1, steps))
    assert len(train(world, task)) == told[-1] == 7 * EPOCHS
    assert told == [2, 7 * EPOCHS]


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


STRUCTURES = [
    (lambda x, y: {"x": x, "y": [y, "text", None]}, lambda b: (b["x"], b["y"][0])),
    (lambda x, y: (x, {"y": y}), lambda b: (b[0], b[1]["y"])),
    (Pair, lambda b: (b.inputs, b.targets)),
    (lambda x, y: Record(x, "name", [y]), lambda b: (b.inputs, b.targets[0])),
    (Movable, lambda b: (b.inputs, b.targets if b.moved_to is not None else None)),
    (lambda x, y: Named(x=x, y=y), lambda b: (b.data["x"], b.data["y"])),
]


def test_batches_of_any_structure(world):
    expected = regression()
    train(world, expected, max_steps=2)
    for make, parts in STRUCTURES:
        task = regression(
            collate=lambda samples, make=make: make(*map(torch.stack, zip(*samples, strict=True))),
            loss=lambda model, batch, parts=parts: squares(model, parts(batch)),
            weight=lambda batch, parts=parts: len(parts(batch)[0]),
        )
        train(world, task, max_steps=2)
        assert relative(weights_of(task.model), weights_of(expected.model)) < 1e-12, make


def test_compiled_models(world):
    task, plain = language(model=torch.compile(Language(), backend="eager")), language()
    train(world, task, max_steps=3)
    train(world, plain, max_steps=3)
    assert relative(weights_of(task.model), weights_of(plain.model)) < 1e-12


@OPEN_AND_ALSO_CLOSED
def test_a_rank_without_samples_leaves_no_trace(world, is_open):
    def run(shares):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        task, loss = in_form(regression(model=model), is_open)
        # With "auto" two runs may measure different algorithms, which sum in different orders.
        with Training(task, **{**QUIET, "max_steps": 6, "allreduce": "flat"}) as training:
            for _ in steps_of(training, loss):
                training._session.loop.sampler.set_plan(shares)
        return weights_of(model)

    # The last rank's own samples never count: whatever it computes instead leaves nothing.
    by_two = run([8, 16, 0])
    assert by_two.tolist() == run([8, 16, 0]).tolist()
    assert by_two.isfinite().all()
    assert gather_values(world.comm, by_two.tolist()) == [by_two.tolist()] * world.size


@pytest.mark.parametrize("precision", by_default(["bf16", "fp16"], ["bf16"]))
@CLOSED_AND_ALSO_OPEN
def test_other_precisions_learn(world, precision, is_open):
    task = regression(
        data=[(x.float(), y.float()) for x, y in points()],
        loss=lambda model, batch: functional.mse_loss(model(batch[0]).float(), batch[1]),
        optimizer=lambda m: [SGD(m[0].parameters(), lr=0.05), AdamW(m[2].parameters(), lr=0.01)],
        clip_norm=1.0,
    )
    task.model.float()
    steps = train(world, task, is_open, precision=precision)
    assert sum(step.is_finite for step in steps) > 15  # fp16 begins with a scale that is too large
    first, last = (sum(step.loss for step in part) for part in (steps[:6], steps[-7:-1]))
    assert last < 0.8 * first


def sums(model, batch):
    error = (model(batch[0]) - batch[1]).square()
    return {
        "error": error.sum(),
        "halved": (error.sum(), 2 * len(error)),
        "seen": (float(batch[0].sum()), 1.0 * len(error)),
    }


@ALSO_ALONE
@pytest.mark.parametrize(
    ("length", "shares"),
    [
        *[(37, [24, 0, 0]), (1, [8, 8, 8])],
        *by_default([(37, [1, 3, 20]), (37, [8, 8, 8])], ()),
    ],
)
def test_evaluation_counts_every_sample_once(world, length, shares):
    data = points(length)
    task = regression(validation=data, metrics=sums)
    with Training(task, **{**QUIET, "max_steps": 3}) as training:
        training.evaluate()
        for step in training:
            assert training.model.training
            if world.size == 3:
                training._session.loop.sampler.set_plan(shares)
            if step.number == 2:
                break
        results = training.evaluate()
    whole = data[:]
    error = (task.model(whole[0]) - whole[1]).square().mean().item()
    expected = {"error": error, "halved": error / 2, "seen": whole[0].sum().item() / length}
    assert results == pytest.approx(expected, rel=1e-9)
    assert gather_values(world.comm, results) == [results] * world.size


@ALSO_ALONE
def test_evaluation_without_metrics_is_the_weighted_loss(world):
    task = language(validation=texts()[:37])
    with Training(task, **{**QUIET, "max_steps": 2}) as training:
        for _ in training:
            pass
        results = training.evaluate()
    whole = pad(texts()[:37])
    assert results == {"loss": pytest.approx(token_loss(task.model, whole).item(), rel=1e-12)}


@ALSO_ALONE
def test_logged_figures_are_in_the_metrics(world, shared_path):
    settings = {**QUIET, "log_interval": 0.0, "max_steps": 5, "run_dir": str(shared_path / "run")}
    with Training(regression(), **settings) as training:
        training.log(before=7)
        for step in training:
            training.log(number=torch.tensor(float(step.number)))
    if world.rank == 0:
        logged = [line.get("logged") for line in read_lines(shared_path / "run" / "metrics.jsonl")]
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
@pytest.mark.thorough(1)
@CLOSED_AND_ALSO_OPEN
def test_a_sink_of_ones_own_gets_the_metrics_of_all_ranks(world, shared_path, caplog, is_open):
    task = regression(validation=points(37), metrics=sums)
    sink, tensorboard, folder = Collecting(), not is_open, shared_path / "run"
    settings = {"log_interval": 0.0, "max_steps": 5, "tensorboard": tensorboard, "sinks": [sink]}
    train(world, task, is_open, run_dir=str(folder), **settings)
    if world.rank != 0:
        assert sink.last is None
        return
    lines = read_readings(folder)
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
    (evaluation,) = [line for line in read_lines(folder / "metrics.jsonl") if "validation" in line]
    assert set(evaluation) == {"step", "epoch", "time", "validation"}
    events = read_lines(folder / "events.jsonl")
    assert [event["kind"] for event in events] == sink.kinds[:-1]
    assert events == sorted(events, key=lambda event: event["time"])
    assert bool(list(folder.glob("tensorboard/events*"))) == tensorboard
    assert read_lines(folder / "plan.jsonl")[0]["ranks"] == last["ranks"]


class Counter:
    """Something of the user's own that belongs to the training."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.mark.thorough
@ALSO_ALONE
@OPEN_AND_ALSO_CLOSED
def test_a_run_is_continued_after_a_break(world, shared_path, is_open):
    def metrics(model, batch):
        return {"loss": (token_loss(model, batch) * tokens(batch), tokens(batch))}

    def run(until=None, **settings):
        counter = Counter()
        parts = {"scheduler": CosineAnnealingLR, "extra_state": {"counter": counter}}
        given = language(validation=texts()[:9], metrics=metrics, **parts)
        (task, loss), numbers = in_form(given, is_open), []
        with Training(task, **{**QUIET, "run_dir": folder, **settings}) as training:
            for step in steps_of(training, loss):
                numbers.append(step.number)
                counter.seen += 1
                if step.number == until:
                    break
            results = training.evaluate()
        assert training.summary.finished == (until is None)
        assert counter.seen == (until or 21)
        return weights_of(task.model), numbers, results

    folder = ""
    expected, _, result = run()
    folder = str(shared_path / "run")
    assert run(until=9)[1] == list(range(1, 10))
    weights, numbers, evaluated = run(resume="auto", micro_batch_size=0 if is_open else 5)
    assert numbers == list(range(10, 22))
    assert relative(weights, expected) < 1e-12
    assert evaluated["loss"] == pytest.approx(result["loss"], rel=1e-9)
    # And once more: it is finished, and its weights and results are there.
    again, numbers, evaluated_again = run(resume="auto")
    assert numbers == []
    assert again.tolist() == weights.tolist()
    assert evaluated_again == evaluated


def islice_of_each_epoch(make_steps):
    """Loop as the script's own epochs do, never asking for more than there is."""
    steps = make_steps()
    for _ in range(EPOCHS):
        yield from itertools.islice(steps, 7)


def loop_per_epoch(make_steps):
    for _ in range(EPOCHS):
        yield from itertools.islice(make_steps(), 7)


@pytest.mark.parametrize(
    "loop", [islice_of_each_epoch, pytest.param(loop_per_epoch, marks=pytest.mark.thorough)]
)
@CLOSED_AND_ALSO_OPEN
def test_a_loop_that_asks_for_no_more_steps_finishes(world, shared_path, loop, is_open):
    task, loss = in_form(language(), is_open)
    exported = shared_path / "model.safetensors"
    settings = {**QUIET, "run_dir": str(shared_path / "run"), "export": str(exported)}
    with Training(task, **settings) as training:
        for _ in loop(lambda: steps_of(training, loss)):
            pass
    assert training.summary.finished
    assert training.summary.steps == 7 * EPOCHS
    assert exported.exists()


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), pytest.param(GeneratorExit(), marks=pytest.mark.thorough), ZeroDivisionError()],
)
def test_an_exit_from_the_loop_saves_as_a_return_does(world, shared_path, error):
    def leave(training, step):
        if step.number == 4:
            raise error

    with pytest.raises(type(error)):
        train(world, language(), after=leave, run_dir=str(shared_path / "run"))
    if world.rank == 0:
        summary = json.loads((shared_path / "run" / "summary.json").read_text())
        assert not summary["finished"]
        is_saved = (shared_path / "run" / "checkpoints" / "step-00000004.pt").exists()
        assert is_saved == (not isinstance(error, Exception))


@pytest.mark.parametrize(("is_open", "last"), by_default([(False, 7), (True, 2)], [(True, 2)]))
def test_ranks_wait_for_one_in_the_scripts_own_code(world, monkeypatch, capfd, is_open, last):
    """As for a rank that evaluates alone, after an epoch or in it; the watchdogs know of each."""
    began_again = []
    renew = Watchdog.renew

    def record(self, phase, allowed_sec):
        began_again.append(phase)
        renew(self, phase, allowed_sec)

    def stay(_, step):
        if step.number == last and world.rank == 1:
            give_up = time.monotonic() + 60
            while not began_again:  # by an answer of a rank that waits
                assert time.monotonic() < give_up
                time.sleep(0.05)
            phase = current_watchdog().phase
            assert (str(phase), phase.allowed_sec) == (f"the script's own code of step {last}", 160)

    monkeypatch.setattr(Watchdog, "renew", record)
    assert len(train(world, language(), is_open, after=stay, step_timeout=8)) == 7 * EPOCHS
    expected = "the sum of gradients" if is_open else "the end of the epoch"
    assert world.rank == 1 or expected in {phase.name for phase in began_again}
    said = f"s in the script's own code of step {last}: other ranks are waiting for this one"
    assert (said in capfd.readouterr().err) == (world.rank == 1)


@ALSO_ALONE
def test_without_a_run_folder_nothing_is_written(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(world, regression(validation=points(37)), max_steps=2)
    assert list(tmp_path.iterdir()) == []
