"""Sharded parameters train as whole ones do, whoever owns what."""

import copy
import itertools

import loops
import pytest
import torch
from layers import Attends
from one_process import alone, compare
from samples import Points
from test_shards import LOSS, OPTIMIZERS, compute_loss, sgd
from test_shards import train as train_alike  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kaitian_mpi.balance import ownership
from kaitian_mpi.balance.ownership import cut_into_runs
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.distributed.gathering import Gathering, ParameterGathers
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.task import Task

pytestmark = pytest.mark.sizes(1, 3)

SAMPLES, STEPS = 54, 4  # more than an epoch, whose last batch is a small one


class Net(nn.Module):
    """Ties its last weight to its first, repeats a block, and recomputes one in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 16, bias=False)
        self.blocks = nn.ModuleList(Attends(16) for _ in range(2))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(3, 4)
        self.double()

    def forward(self, x):
        # With one place, or a bias, attention has gradients of zero, and AdamW steps by rounding.
        hidden = {"x": self.first(torch.stack([x, x.flip(1)], 1))}
        hidden["x"] = self.blocks[0](hidden["x"])
        hidden["x"] = checkpoint(self.blocks[1], hidden["x"], use_reentrant=False)
        hidden["x"] = self.frozen(self.blocks[0](hidden["x"])).tanh_()
        return self.last(functional.linear(hidden["x"][:, 0], self.first.weight.t()))


def make_task(optimizer, clip_norm=None):
    return Task(
        model=Net(),
        optimizer=OPTIMIZERS[optimizer],
        data=Points(SAMPLES),
        validation=Points(SAMPLES),
        loss=lambda m, batch: LOSS(m(batch[0]), batch[1]),
        clip_norm=clip_norm,
    )


@pytest.fixture
def make_run(world):
    def make(optimizer="adamw", clip_norm=None, can_overlap=True, **options):
        task = make_task(optimizer, clip_norm)
        # The last of the parameters stays whole.
        sharded = range(len(list(task.model.parameters())) - 1)
        memory = [3, 1, 2][: world.size]  # the batches are 1 : 2 : 3
        layout = loops.shard_layout(world, memory, sharded, can_overlap=can_overlap)
        options = {"layout": layout, "epochs": 9, **options}
        return task, loops.Run(world, loops.uneven(world), task=task, **options)

    return make


def check(world, run, task, initial, taken, tmp_path):
    """Compare a run with one process that has trained on the same batches."""
    expected, optimizers, _ = alone(
        world,
        Task(**{**vars(task), "model": initial, "validation": None}),
        [run.setup.train[indices] for indices in taken],
    )
    pieces = itertools.count()
    state, _ = run.state.collect(world, tmp_path, lambda: next(pieces))
    assert (next(pieces) > 0) is (world.rank == 0)
    if world.rank == 0:
        compare(dict(state["model"]), dict(expected.state_dict()))
        for own, other in zip(state["optimizers"], optimizers, strict=True):
            compare(own["state"], other.state_dict()["state"])


def train(world, run, steps, taken):
    """Train and evaluate epochs until so many steps are taken; note their samples."""
    while len(taken) < steps:
        for step in run.epoch():
            taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
            assert step.is_finite
            if len(taken) == steps:
                return
        run.results.append(run.loop.evaluate())
        run.state.progress.epoch_done(9)


@pytest.mark.thorough(1)
def test_values_move_to_other_owners_and_their_mirrors(world, make_run, tmp_path):
    initial = make_task("matrices").model
    task, run = make_run("matrices", 0.5, micro_batch_size=5 if world.rank else None)
    train(world, run, 2, taken := [])
    run.loop.close()
    memory = [1, 3, 1][: world.size]
    sharded = range(len(list(task.model.parameters())) - 1)
    run.maker.layout = loops.shard_layout(world, memory, sharded, mirrors=world.size > 1)
    run.make_loop()
    train(world, run, 5, taken)
    run.close()
    check(world, run, task, initial, taken, tmp_path)
    # Nothing is whole on a rank, besides the last parameter.
    with torch._C.DisableTorchFunctionSubclass():
        *sharded, last = (p.untyped_storage().nbytes() for p in task.model.parameters())
    assert (set(sharded), last) == ({8}, 4 * 8)


def test_a_parameter_cannot_be_used_between_steps(world, make_run):
    task, run = make_run()
    train(world, run, 1, [])
    weight = task.model.first.weight
    uses = task.model.state_dict, weight.sum, weight.tolist, lambda: copy.deepcopy(weight)
    for use in (*uses, lambda: task.model(torch.ones(1, 3)), lambda: weight.data):
        with pytest.raises(UserError, match="is sharded, and whole only"):
            use()
    assert (weight.shape, weight.dtype, weight.grad) == ((16, 3), torch.float64, None)
    run.close()


def test_parameters_must_be_used_in_the_same_order(world, make_run):
    """On each rank in the first step, and then as in that."""
    for steps, error in ((0, AgreedError), (1, UserError)):
        task, run = make_run()
        train(world, run, steps, [])
        blocks = task.model.blocks
        if world.rank == 0 or steps:
            blocks[0], blocks[1] = blocks[1], blocks[0]
        if world.size > 1 or steps:
            with pytest.raises(error, match="used in the same order"):
                train(world, run, 1, [])
        run.close()


@pytest.mark.parametrize("can_overlap", [True, False])
def test_freed_memory_is_returned_if_there_is_none_to_spare(make_run, monkeypatch, can_overlap):
    calls = []
    monkeypatch.setattr(CpuDevice, "return_large_blocks", lambda _: calls.append("return"))
    _, run = make_run(can_overlap=can_overlap, evaluates=False)
    run.close()
    assert len(calls) == (not can_overlap)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("can_overlap", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("cap", [1, pytest.param(3000, marks=pytest.mark.thorough)])
def test_the_next_parameters_are_gathered_while_one_computes(
    world, make_run, monkeypatch, can_overlap, cap
):
    """If there is room for them; from the second step on, when the order is known."""
    monkeypatch.setattr(ownership, "BUCKET_CAPS", (cap, cap))
    rounds = [[]]

    def noting(name, function):
        def call(gathering, number, *options, **named):
            rounds[-1].append((name, number))
            return function(gathering, number, *options, **named)

        return call

    def end_round(gathering, function=Gathering.end_round):
        rounds.append([])
        function(gathering)

    for kind, name in ((Gathering, "unshard"), (ParameterGathers, "start")):
        monkeypatch.setattr(kind, name, noting(name, getattr(kind, name)))
    monkeypatch.setattr(Gathering, "end_round", end_round)
    task, run = make_run(can_overlap=can_overlap, evaluates=False)
    train(world, run, 3, [])
    run.close()
    first, second, *_ = rounds
    order = [number for name, number in second if name == "unshard"]
    assert first == [
        call for number in order for call in (("unshard", number), ("start", [number]))
    ]
    sizes = {number: p.numel() * 8 for number, p in enumerate(task.model.parameters())}
    runs = cut_into_runs(order, sizes, cap)
    started = [numbers for name, numbers in second if name == "start"]
    assert started == [[*dict.fromkeys(numbers)] for numbers in runs]
    firsts = [*itertools.accumulate(map(len, runs), initial=0)][:-1]  # uses before each run's
    begun = 0
    used = 0
    for name, _ in second:
        if name == "start":
            begun += 1
            assert begun <= sum(first < used for first in firsts) + can_overlap
            continue
        current = sum(first <= used for first in firsts) - 1
        if can_overlap and used == firsts[current] > 0:
            assert begun > current or {*runs[current]} & {*runs[current - 1]}
        used += 1


class Square(torch.autograd.Function):
    """Saves a parameter before it uses it, or another one after that."""

    @staticmethod
    def forward(ctx, x, one, other):
        ctx.save_for_backward(x, one, other)
        return (x @ one) * other.sum()

    @staticmethod
    def backward(ctx, slope):
        x, one, other = ctx.saved_tensors
        inner = slope * other.sum()
        of_other = (slope * (x @ one)).sum().expand_as(other)
        return inner @ one.t(), x.t() @ inner, of_other


class Together(nn.Module):
    """Uses parameters together with one that has just been used alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(3, 9), nn.Linear(9, 4)
        self.a, self.b = nn.Parameter(torch.randn(9, 9)), nn.Parameter(torch.randn(9, 9))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(hidden @ self.a) @ (self.a * self.b)
        hidden = torch.tanh(Square.apply(hidden, self.a, self.b / 9))
        hidden = torch.tanh(Square.apply(hidden, self.b, self.a))
        hidden = hidden + self.last.weight.sum()  # and then with its bias
        norms = torch._foreach_norm([self.a, self.b, self.first.weight])
        return self.last(hidden) + sum(norms) / 99


def test_functions_use_several_parameters(train_alike):  # noqa: F811
    model = Together()
    task = Task(model=model, data=Points(), loss=compute_loss, optimizer=sgd, clip_norm=0.1)
    train_alike(task, micro_batch_size=None, sharded=range(len(list(model.parameters()))))


class Decayed(nn.Module):
    """Changes a parameter in each forward."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(5)
        self.layers, self.change = (
            nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4)),
            change,
        )
        self.double()

    def forward(self, x):
        self.change(self.layers[0].weight)
        return self.layers(x)


def shrink(weight):
    with torch.no_grad():
        weight *= 0.9


def shrink_data(weight):
    weight.sum()  # which brings it first
    weight.data.mul_(0.9)


@pytest.mark.parametrize("change", [shrink, pytest.param(shrink_data, marks=pytest.mark.thorough)])
def test_a_forward_may_change_parameters_in_place(train_alike, change):  # noqa: F811
    model = Decayed(change)
    task = Task(model=model, data=Points(), loss=compute_loss, optimizer=sgd)
    train_alike(task, micro_batch_size=None, sharded=[0, 2, 3])


def set_data(weight):
    weight.data = weight.data * 0.9


@pytest.mark.parametrize(
    ("change", "mirrors", "match"),
    [
        (set_data, False, r"layers.0.weight.data was set by a forward"),
        (shrink, True, r"layers.0.weight was changed by a forward, .* --no-mirrors"),
    ],
)
def test_changes_that_would_be_lost_are_refused(world, change, mirrors, match):
    if mirrors and world.size == 1:
        return
    task = Task(model=Decayed(change), data=Points(), loss=compute_loss, optimizer=sgd)
    memory = [3, 1, 2][: world.size]
    layout = loops.shard_layout(world, memory, sharded=[0, 2, 3], mirrors=mirrors)
    run = loops.Run(world, loops.uneven(world), task=task, layout=layout)
    with pytest.raises(UserError, match=match):
        next(run.epoch())
    run.loop.close(together=False)
    run.maker.close()
