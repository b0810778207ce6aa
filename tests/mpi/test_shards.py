"""Layout shard trains as one process does, whoever owns what."""

import copy
import itertools
from contextlib import suppress

import loops
import pytest
import torch
from one_process import alone
from samples import Points
from torch import nn

from kaitian_mpi.balance.ownership import with_mirrors, without_mirrors
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.train.layouts.shard.memory_budget import (
    MemoryBudget,
    find_memory_budget,
    shard_needs,
)
from kaitian_mpi.train.layouts.shard.shard_layout import check_can_shard
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import weights as weights_of
from kaitian_mpi.train.task import Task

pytestmark = pytest.mark.sizes(1, 3)
further_sizes = pytest.mark.thorough(1)

STEPS = 20


class Matrices(torch.optim.Optimizer):
    """Turns each gradient by its whole matrix, so rows of it would not do (as Muon)."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
                    grad = parameter.grad
                    parameter -= (
                        group["lr"]
                        * grad
                        / (1e-3 + torch.linalg.matrix_norm(grad.view(len(grad), -1)))
                    )


def groups(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "matrices": lambda m: Matrices(m.parameters(), lr=0.01),
    "two": lambda m: [
        torch.optim.AdamW(groups(m)[0]["params"], lr=0.01),
        torch.optim.SGD(groups(m)[1]["params"], lr=0.1),
    ],
}
LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Has a tied weight, a layer that only some samples use, and a parameter that none does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle = nn.Linear(3, 40), nn.Linear(40, 40)
        self.rare, self.last = nn.Linear(40, 40, bias=False), nn.Linear(40, 4)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(7))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        hidden = hidden + self.frozen(torch.tanh(self.middle(hidden)))
        if (x[:, 0] > 0.9).any():
            hidden = hidden + self.rare(hidden) * (x[:, :1] > 0.9)
        return self.last(hidden)


def compute_loss(model, batch):
    return LOSS(model(batch[0]), batch[1])


def make_task(optimizer, clip_norm=None, loss=compute_loss, model=None):
    data = Points()
    return Task(
        model=model or Net(),
        optimizer=OPTIMIZERS[optimizer],
        data=data,
        loss=loss,
        clip_norm=clip_norm,
        scheduler=lambda o: [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.98)
            for each in (o if isinstance(o, list) else [o])
        ],
    )


def check_against_one_process(task, run, initial, taken):
    """Check that a run's weights are those of one process that took these samples in each step."""
    data = run.setup.train
    task_alone = Task(**{**vars(task), "model": initial})
    expected, *_ = alone(run.world, task_alone, [data[indices] for indices in taken])
    for parameter, other in zip(task.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


@pytest.fixture
def make_run(world):
    def make(
        optimizer="adamw", clip_norm=None, loss=compute_loss, model=None,
        memory=(3, 1, 2), mirrors=False, **options,
    ):  # fmt: skip
        task = make_task(optimizer, clip_norm, loss, model)
        # The batches are 1 : 2 : 3.
        layout = loops.shard_layout(world, memory[: world.size], mirrors=mirrors)
        return task, loops.Run(world, loops.uneven(world), task=task, layout=layout, **options)

    return make


class LateWork:
    """Does nothing before it is waited for."""

    def __init__(self, call):
        self.wait = call


def test_whatever_uses_new_values_waits_for_them(world, make_run, monkeypatch):
    """Whether in the model, outside of it, or between two steps."""
    gather, known = torch.distributed.all_gather, {}

    def late_gather(pieces, tensor, group, async_op):
        return LateWork(lambda: gather(pieces, tensor, group))

    def loss(model, batch):
        trainable = known.setdefault(model, [p for p in model.parameters() if p.requires_grad])
        return sum(p.square().sum() for p in trainable) / 99 + LOSS(model(batch[0]), batch[1])

    task, run = make_run("adamw", loss=loss)
    initial, taken = copy.deepcopy(task.model), []
    # Another test in this process may have compiled something.
    monkeypatch.setattr("kaitian_mpi.distributed.value_gathers.is_compiling", lambda: False)
    monkeypatch.setattr(torch.distributed, "all_gather", late_gather)
    for step in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
        assert all(type(p) is not nn.Parameter and p.is_contiguous() for p in known[task.model])
        if step.number == 2:
            weights = [value.tolist() for value in run.state.model_state().values()]
            assert gather_values(world.comm, weights) == [weights] * world.size
        if step.number == 3:
            copied = list(copy.deepcopy(task.model).parameters())
            assert {type(p) for p in copied} == {nn.Parameter}
            sums = [p.sum().item() for p in copied]
            assert gather_values(world.comm, sums) == [sums] * world.size
    run.close()
    data = run.setup.train
    task_alone = Task(**{**vars(task), "model": initial})
    expected, *_ = alone(run.world, task_alone, [data[indices] for indices in taken])
    for parameter, other in zip(task.model.parameters(), expected.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


def test_views_of_parameters_that_a_script_keeps_have_the_new_values(world, make_run, monkeypatch):
    gather = torch.distributed.all_gather

    def late_gather(pieces, tensor, group, async_op):
        return LateWork(lambda: gather(pieces, tensor, group))

    task, run = make_run("adamw")
    monkeypatch.setattr("kaitian_mpi.distributed.value_gathers.is_compiling", lambda: False)
    monkeypatch.setattr(torch.distributed, "all_gather", late_gather)
    trained, views = [p for p in task.model.parameters() if p.requires_grad], {}
    for step in run.epoch():
        sums = [view.sum().item() for view in views.values()]
        assert gather_values(world.comm, sums) == [sums] * world.size
        is_kept = bool(views)
        assert all((type(p) is nn.Parameter) is is_kept for p in trained)
        views = task.model.state_dict() if step.number in (2, 3) else {}
    run.close()


class Unseen(nn.Module):
    """Uses some of its parameters without torch's functions, if not `is_seen`."""

    def __init__(self, is_seen=False):
        super().__init__()
        torch.manual_seed(3)
        first, self.last = nn.Linear(3, 9), nn.Linear(9, 4)
        self.first = first if is_seen else torch.jit.script(first)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_values_that_are_used_unseen_do_not_come_late(world, make_run, monkeypatch):
    task, run = make_run("fused", model=Unseen())
    monkeypatch.setattr("kaitian_mpi.distributed.value_gathers.is_compiling", lambda: False)
    run.loop.close()
    initial, taken = Unseen(is_seen=True), []
    run.make_loop()
    for _ in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
        assert {type(p) for p in task.model.parameters()} == {nn.Parameter}
    run.close()
    check_against_one_process(task, run, initial, taken)


def owned_bytes(run):
    """Return this rank's bytes of gradients and of the optimizer's state."""
    shards = run.state.partition
    gradients = sum(bucket.own.nbytes for bucket in run.loop.engine.gradients._layout.buckets)
    values = [v for o in run.state.optimizers for state in o.state.values() for v in state.values()]
    state = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.dim())
    assert not any(p.grad is not None for p in run.state.model.parameters())
    assert all(target.grad is None for target in shards.targets.values())
    return gradients, state


def test_each_rank_has_its_share_of_gradients_and_state(world, make_run):
    memory = [3, 1, 2][: world.size]
    _, run = make_run("adamw", memory=memory)
    for _ in run.epoch():
        pass
    gathered = gather_values(world.comm, owned_bytes(run))
    run.close()
    for every in zip(*gathered, strict=True):
        shares = [share / sum(memory) for share in memory]
        owned = [owned_bytes / sum(every) for owned_bytes in every]
        assert owned == pytest.approx(shares, rel=0.05)


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adamw", marks=pytest.mark.thorough), "matrices"]
)
def test_other_owners_continue_with_the_same_state(world, make_run, optimizer):
    task, run = make_run(optimizer)
    initial = copy.deepcopy(task.model)
    taken = []
    for step in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
        if step.number == 3:
            run.loop.close()
            assert run.state.partition.is_complete(world.comm)
            run.maker.layout = loops.shard_layout(world, [1, 3, 1][: world.size])
            break
    run.make_loop()
    for _ in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
    run.close()
    check_against_one_process(task, run, initial, taken)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("optimizer", "mirrors"),
    [
        pytest.param("two", True, marks=pytest.mark.thorough(2)),
        ("adamw", False),
        *(pytest.param(name, True, marks=pytest.mark.thorough) for name in ("adamw", "sgd")),
        pytest.param("matrices", True, marks=pytest.mark.thorough),
    ],
)
def test_mirrors_have_what_a_lost_rank_had(world, make_run, monkeypatch, optimizer, mirrors):
    """The last rank forgets its part; so it has to come from the others.

    With mirrors, another rank is then interrupted amid the move, of which the others are done.
    """
    task, run = make_run(optimizer, 0.5, memory=[2, 1, 1], mirrors=mirrors)
    initial = copy.deepcopy(task.model)
    taken = []
    for step in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
        if step.number == 3:
            break
    shards = run.state.partition
    run.loop.close()
    if world.rank == world.size - 1:
        shards.drop()
        with torch.no_grad():
            for parameter in task.model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
    assert shards.is_complete(world.comm) is mirrors
    if not mirrors:
        run.maker.close()
        return

    def move_and_fail(*args, move=shards._move_values):
        move(*args)
        raise ZeroDivisionError

    with monkeypatch.context() as patched, suppress(ZeroDivisionError):
        if world.rank == 0:
            patched.setattr(shards, "_move_values", move_and_fail)
        shards.assign(world, with_mirrors([1, 2, 2][: world.size], "abc"[: world.size]))
    assert shards.is_complete(world.comm)
    run.maker.layout = loops.shard_layout(world, [3, 2, 2][: world.size], mirrors=True)
    run.make_loop()
    for _ in run.epoch():
        taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
    run.close()
    check_against_one_process(task, run, initial, taken)


@pytest.mark.sizes(2)
def test_what_an_optimizer_allocates_while_it_steps_is_left_for_it(world):
    """AdamW's `foreach` allocates as much as the parameters that it steps."""
    budgets, optimizers = {}, {"each": False, "at once": True}
    for name, foreach in optimizers.items():
        model = nn.Linear(1000, 1000, bias=False)
        task = Task(
            model=model,
            optimizer=lambda m, f=foreach: torch.optim.AdamW(m.parameters(), foreach=f),
            data=Points(),
            loss=compute_loss,
        )
        config = TrainingConfig(layout="shard", mirrors=False)
        budgets[name], _ = find_memory_budget(Setup(task, NoFolder()), config, world)
        taken = budgets[name].optimizer_bytes(config, world)
        assert sum(taken) == pytest.approx(4e6 * foreach)
    for place, size in budgets["each"].by_place.items():
        assert budgets["at once"].by_place[place] == pytest.approx(size * 3 / 4, rel=0.05)


@pytest.mark.sizes(2)
def test_the_memory_for_the_next_parameter_in_parts_is_planned(world):
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 500, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    (_, need), sharded = shard_needs(TrainingConfig(layout="shard"), model, [optimizer])
    assert need.small == 4e6
    pairs = without_mirrors([1.0] * world.size)
    for factor, can_overlap in ((1.1, False), (2.0, True)):
        rank_bytes = factor * need.owned / world.size
        budget = MemoryBudget({info.place: rank_bytes for info in world.infos}, need, sharded)
        assert budget.can_overlap(pairs, world) == can_overlap


@pytest.fixture
def train(world, monkeypatch):
    """Return what trains a task in shards, and compares it with one process."""

    def train(task, micro_batch_size=2, between=lambda model, step: None, sharded=()):
        monkeypatch.setattr("kaitian_mpi.distributed.value_gathers.is_compiling", lambda: False)
        initial, taken, step = copy.deepcopy(task.model), [], 0
        layout = loops.shard_layout(world, [3, 1, 2][: world.size], sharded)
        run = loops.Run(
            world, loops.uneven(world), task=task, layout=layout,
            micro_batch_size=micro_batch_size, epochs=9,
        )  # fmt: skip
        for step_sum in run.epoch():
            taken.append(sorted(itertools.chain(*gather_values(world.comm, run.taken[-1]))))
            assert step_sum.is_finite
            between(task.model, step_sum.number)
        model_state, _ = run.state.collect_model(world, None)
        weights = weights_of(model_state) if world.rank == 0 else {}
        run.close()
        one = copy.deepcopy(initial)
        optimizers = task.make_optimizers(one)
        for step, indices in enumerate(taken, 1):
            one.zero_grad()
            task.loss(one, run.setup.train[indices]).backward()
            if task.clip_norm:
                nn.utils.clip_grad_norm_(one.parameters(), task.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            between(one, step)
        for name, value in weights.items():
            torch.testing.assert_close(value, one.state_dict()[name], rtol=1e-12, atol=1e-12)

    return train


def small(*layers):
    torch.manual_seed(5)
    return nn.Sequential(*(layers or (nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 4)))).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


class Weighed:
    """A loss whose samples count if their first number says so; NaN or odd if none does."""

    def __init__(self, is_odd):
        self.is_odd = is_odd

    def counts(self, batch):
        return ((batch[0][:, 0] * 10).long() % 3 == 0).double()

    def weight(self, batch):
        return self.counts(batch).sum()

    def loss(self, model, batch):
        counts = self.counts(batch)
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        if self.is_odd and not counts.any():
            return losses.mean()
        return (losses * counts).sum() / counts.sum()


@pytest.mark.thorough
@further_sizes
@pytest.mark.parametrize("is_odd", [True, False])
def test_micro_batches_in_which_nothing_counts_add_nothing(train, is_odd):
    weighed = Weighed(is_odd)
    train(
        Task(model=small(), data=Points(), loss=weighed.loss, weight=weighed.weight, optimizer=sgd),
        micro_batch_size=1,
    )


@pytest.mark.thorough
@further_sizes
@pytest.mark.parametrize("sharded", [(), (0, 2)])
def test_parameters_are_frozen_and_unfrozen_between_steps(train, sharded):
    model = small(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
    model[2].requires_grad_(False)

    def between(model, step):
        if step == 2:
            model[2].requires_grad_(True)
        if step == 4:
            model[0].requires_grad_(False)

    task = Task(model=model, data=Points(), loss=compute_loss, optimizer=sgd, clip_norm=0.5)
    train(task, between=between, sharded=sharded)


class Renormed(nn.Module):
    """Sets the data of a parameter in each forward, of another layout than it has had."""

    def __init__(self, is_transposed=False):
        super().__init__()
        self.layers, self.is_transposed = small(), is_transposed
        with torch.no_grad():
            self.layers[0].weight *= 2

    def forward(self, x):
        weight = self.layers[0].weight
        data = torch.renorm(weight.data, 2, 0, 0.5)
        weight.data = data.t().contiguous().t() if self.is_transposed else data
        return self.layers(x)


def scale(model, step):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.95, model.parameters())


@further_sizes
@pytest.mark.parametrize(
    "how", [pytest.param("renorm", marks=pytest.mark.thorough), "transposed", "vector"]
)
def test_parameters_whose_data_is_set_go_on_training(train, how):
    model = small() if how == "vector" else Renormed(how == "transposed")
    between = scale if how == "vector" else lambda model, step: None
    train(Task(model=model, data=Points(), loss=compute_loss, optimizer=sgd), between=between)


class Transformed(nn.Module):
    """Uses gradients by its input, of a function with its parameters and of one of them."""

    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x):
        weight = self.layers[0].weight
        mean = torch.func.vmap(torch.mean)(weight).sum()
        slope = torch.func.grad(lambda weight: weight.square().sum())(weight).sum()
        slopes = torch.func.vmap(torch.func.grad(lambda one: self.layers(one).sum()))(x)
        return self.layers(x) + slopes.sum(1, keepdim=True) + mean * slope


@further_sizes
def test_functions_are_transformed_with_parameters_whose_values_come_late(train):
    train(Task(model=Transformed(), data=Points(), loss=compute_loss, optimizer=sgd))


class Empty(nn.Module):
    """Has parameters of no rows."""

    def __init__(self):
        super().__init__()
        self.layers, self.nothing = small(), nn.Parameter(torch.zeros(0, 5).double())
        self.other = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x):
        return self.layers(x) + self.nothing.sum() + self.other.sum()


@further_sizes
@pytest.mark.parametrize("sharded", [pytest.param((), marks=pytest.mark.thorough), (2,)])
def test_parameters_of_no_rows_do_no_harm(train, sharded):
    train(Task(model=Empty(), data=Points(), loss=compute_loss, optimizer=sgd), sharded=sharded)


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 6, **options), nn.Linear(6, 4)
        self.double()

    def forward(self, x):
        return self.last(self.table((x[:, 0] * 5).long()))


def test_embeddings_that_ranks_cannot_share_are_refused(world, make_run):
    task, run = make_run(model=Words(sparse=True))
    with pytest.raises(UserError, match="sparse=False"):
        next(run.epoch())
    run.loop.close(together=False)
    run.maker.close()
    task = make_task("adamw", model=Words(max_norm=1.0))
    with pytest.raises(UserError, match="an embedding with max_norm"):
        check_can_shard(task)
