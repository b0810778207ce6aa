"""Layout shard under DistributedDataParallel: plain loops against one process, in float64."""

import collections
import contextlib
import copy
import cProfile
import dataclasses
import gc
import itertools
import re
import time
import weakref
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from test_memory import MB, in_memory
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from kaitian_mpi.balance import ownership
from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.distributed.sharded_model import can_be_sharded
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.shard import (
    extend_ddp,
    host_parameters,
    script_calls,
    trainer_shards,
)
from kaitian_mpi.integrations.shard.budget import LayoutSettings, Owners
from kaitian_mpi.integrations.shard.install import Installed
from kaitian_mpi.integrations.shard.placement import Placement
from kaitian_mpi.integrations.shard.remote_reads import RemoteReads, RowValues
from kaitian_mpi.integrations.shard.script_calls import ScriptCall, ScriptCalls

SHARES = 3.0, 1.0, 2.0, 1.0
STEPS = 4
loss_of = nn.CrossEntropyLoss()
pytestmark = pytest.mark.thorough(2, 4)  # of which tests/e2e/test_adaptive.py has trainers
further_sizes = pytest.mark.thorough(1)
also_whole = pytest.mark.parametrize(
    "owners", [pytest.param("whole", marks=pytest.mark.thorough), "sharded"], indirect=True
)


class Net(nn.Module):
    """Uses `some` only when it is asked for, and `never` not at all."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle, self.last = nn.Linear(13, 32), nn.Linear(32, 32), nn.Linear(32, 7)
        self.never, self.some = nn.Linear(32, 32), nn.Linear(32, 32)
        self.double()

    def forward(self, x, some=False):
        h = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(h + self.some(h) if some else h)


@pytest.fixture(scope="module")
def installed(world):
    extensions = Installed(world, LayoutSettings())
    yield
    extensions.close()


def give(monkeypatch, world, shares, is_sharded, prefetches=True):
    """Let ranks own these shares, of all parameters' values as well if these are sharded."""

    def find_owners(settings, world, model, optimizers):
        numbers = range(len([*model.parameters()])) if is_sharded else ()
        pairs = without_mirrors(shares[: world.size])
        return Owners(pairs, frozenset(numbers), prefetches, "")

    monkeypatch.setattr(trainer_shards, "find_owners", find_owners)
    monkeypatch.setattr(ownership, "BUCKET_CAPS", (256, 2048))  # of what is gathered together


@pytest.fixture(params=["whole", "sharded"])
def owners(request, world, installed, monkeypatch):
    give(monkeypatch, world, SHARES, request.param == "sharded")
    return request.param


class Data:
    """The batches of a rank, or those of all ranks for one process."""

    def __init__(self, world, is_own):
        self.world, self.is_own = world, is_own

    def __call__(self, step):
        generator = torch.Generator().manual_seed(step)
        rows = 12 * self.world.size
        x = torch.randn(rows, 13, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 7, (rows,), generator=generator)
        return (x[self.mine], y[self.mine]) if self.is_own else (x, y)

    @property
    def mine(self):
        return slice(self.world.rank, None, self.world.size)

    @property
    def is_first(self):
        """Whether this is rank 0, or one process."""
        return self.world.rank == 0 or not self.is_own

    def ranks(self):
        """Return the slices of the batches of one process that are those of the ranks."""
        return [slice(rank, None, self.world.size) for rank in range(self.world.size)]

    def barrier(self):
        if self.is_own:
            dist.barrier()


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1, **options)


def compare(world, train, tolerance=1e-12, make=Net, model=None, **options):
    """Check that a loop gives the same weights, and results, in a DDP and in one process."""
    reference = make()
    model = model or copy.deepcopy(reference)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **options)
    results = train(ddp, model, Data(world, True))
    expected = train(reference, reference, Data(world, False))
    pairs = itertools.chain(
        zip(model.parameters(), reference.parameters(), strict=True),
        zip(results or [], expected or [], strict=world.rank == 0),
    )
    for one, other in pairs:
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def step_once(model, optimizer, x, y):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def state_of(optimizer):
    """Return all tensors of an optimizer's state, by place and name."""
    state = optimizer.state_dict()["state"]
    places = sorted(state)
    tensors = [state[place][name] for place in places for name in sorted(state[place])]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def by_groups(model):
    groups = [[p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False)]
    decayed, other = groups
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}], 1e-2
    )


OPTIMIZERS = {
    "adamw": lambda model: adamw(model.parameters()),
    "one_by_one": lambda model: adamw(model.parameters(), foreach=False),
    "fused": lambda model: adamw(model.parameters(), fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True),
    "groups": by_groups,
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 1e-2),
}


@also_whole
@pytest.mark.parametrize("name", by_default(OPTIMIZERS, ("sgd", "adafactor")))
@pytest.mark.filterwarnings("ignore:.*is not known to step each element")
def test_optimizers_and_their_state(world, owners, name):
    def train(model, module, data):
        optimizer = OPTIMIZERS[name](model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            step_once(model, optimizer, *data(step))
            scheduler.step()
        states = state_of(optimizer) if data.is_first else []
        data.barrier()
        return states

    compare(world, train)


def to_none(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = None


def by_zero(module, optimizer):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARS = {
    "module": lambda module, optimizer: module.zero_grad(),
    "zeros": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    "zeros_of_module": lambda module, optimizer: module.zero_grad(set_to_none=False),
    "by_hand": to_none,
    "zeros_by_hand": by_zero,
}


@further_sizes
@also_whole
@pytest.mark.parametrize(
    ("name", "place"),
    by_default(
        itertools.product(CLEARS, ("before", "between", "after")),
        [("zeros", "after"), ("zeros_of_module", "between")],
    ),
)
def test_gradients_are_cleared_in_every_way_at_every_place(world, owners, name, place):
    """Lightning clears between a forward and its backward."""

    def train(model, module, data):
        optimizer = adamw(model.parameters())
        for step in range(3):
            clear = partial(CLEARS[name], module, optimizer)
            if place == "before":
                clear()
            x, y = data(step)
            loss = loss_of(model(x), y)
            if place == "between":
                clear()
            loss.backward()
            optimizer.step()
            if place == "after":
                clear()

    compare(world, train)


@further_sizes
@also_whole
@pytest.mark.parametrize("has_state", by_default([False, True], [True]))
def test_a_closure(world, owners, has_state):
    def train(model, module, data):
        optimizer, losses = adamw(model.parameters()), []
        if has_state:
            optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)

        def closure(x, y):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            return loss

        for step in range(STEPS):
            loss = optimizer.step(partial(closure, *data(step)))
            assert float(loss.detach()) == losses[-1]

    compare(world, train)


@also_whole
@pytest.mark.parametrize(
    ("has_inf", "fused"),
    by_default([(False, False), (True, False), (True, True)], [(True, False)]),
)
def test_a_scaler(world, owners, has_inf, fused):
    def train(model, module, data):
        optimizer = adamw(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        norms, scales = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(step)
            if has_inf and step == 3 and data.is_first:
                x = x.clone()
                x[0, 0] = torch.inf
            scaler.scale(loss_of(model(x), y)).backward()
            if step > 1:
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).nan_to_num(7.0))
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        return [*norms, *scales]

    compare(world, train)


def total_norm(parameters):
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_by_total_norm(parameters):
    parameters = list(parameters)
    norm = total_norm(parameters)
    nn.utils.clip_grads_with_norm_(parameters, 0.2, norm)
    return norm


CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3),
    "inf": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=torch.inf),
    "one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=1.0),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.003),
    "total": total_norm,
    "by_total": clip_by_total_norm,
    "multiply": lambda parameters: [
        parameter.grad.mul_(0.5) for parameter in parameters if parameter.grad is not None
    ][:0],
}


@further_sizes
@also_whole
@pytest.mark.parametrize("name", by_default(CLIPS, ("inf", "multiply")))
def test_clipping(world, owners, name):
    def train(model, module, data):
        optimizer, norms = torch.optim.SGD(model.parameters(), 0.3), []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(data(step)[0]), data(step)[1]).backward()
            norm = CLIPS[name](model.parameters())
            norms += [norm] if isinstance(norm, torch.Tensor) else []
            optimizer.step()
        return norms

    compare(world, train)


@also_whole
@pytest.mark.parametrize("no_sync", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("some", by_default(["none", "of_one_rank", "of_all"], ["of_one_rank"]))
def test_accumulation(world, owners, no_sync, some):
    """A parameter of which only one rank, or micro-batch, has a gradient is not forgotten."""

    def train(model, module, data):
        optimizer, norms = adamw(model.parameters()), []
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                x, y = data(10 * step + micro)
                uses = micro == 0 and some != "none"
                if not data.is_own:
                    flags = [uses and (some == "of_all" or not i) for i in range(data.world.size)]
                    parts = zip(data.ranks(), flags, strict=True)
                    losses = [loss_of(model(x[part], some=flag), y[part]) for part, flag in parts]
                    (sum(losses) / len(losses) / 3).backward()
                    continue
                with model.no_sync() if no_sync and micro < 2 else contextlib.nullcontext():
                    flag = uses and (some == "of_all" or data.is_first)
                    (loss_of(model(x, some=flag), y) / 3).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
        return norms

    compare(world, train)


def two_forwards(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (x, y), (u, v) = data(step), data(step + 50)
        first, second = loss_of(model(x), y), loss_of(model(u), v)
        first.backward()
        second.backward()
        optimizer.step()


def two_forwards_and_a_backward(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (x, y), (u, v) = data(step), data(step + 50)
        (loss_of(model(x), y) + loss_of(model(u), v)).backward()
        optimizer.step()


def used_by_one_rank(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(step)
        if data.is_own:
            loss_of(model(x, some=data.is_first), y).backward()
        else:
            parts = enumerate(data.ranks())
            losses = [loss_of(model(x[part], some=not rank), y[part]) for rank, part in parts]
            (sum(losses) / len(losses)).backward()
        optimizer.step()


def two_optimizers(model, module, data):
    large, small = (
        [p for p in module.parameters() if (p.dim() > 1) == is_large] for is_large in (1, 0)
    )
    optimizers = torch.optim.SGD(large, 0.1, momentum=0.9), adamw(small)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = data(step)
        loss_of(model(x), y).backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()


def created_late(model, module, data):
    loss_of(model(data(0)[0]), data(0)[1]).backward()
    model.zero_grad()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))


def average(model, module, data):
    optimizer = adamw(model.parameters())
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        averaged.update_parameters(module)
    return [parameter.detach().clone() for parameter in averaged.parameters()]


def average_by_hand(model, module, data):
    optimizer = adamw(model.parameters())
    averaged = {name: value.clone() for name, value in module.state_dict().items()}
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        for name, value in module.state_dict().items():
            averaged[name].lerp_(value, 0.5)
    return [*averaged.values()]


def clamp(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.1, 0.1)


def change_data(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        for parameter in module.parameters():
            parameter.data.mul_(0.9)


def change_by_numpy(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        for parameter in module.parameters():
            parameter.detach().numpy()[:2] *= 0.5
        with torch.no_grad():
            module.last.weight.view(-1).numpy()[1:] *= 0.5
            module.middle.weight[0].mul_(0.5)
            module.middle.weight.add_(0.01)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, whose groups it shares."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.detach() * 0.9)
            slow.lerp_(parameter.detach(), 0.5)
            parameter.detach().copy_(slow)


def compute_again(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss


def a_step_inside_a_step(model, module, data):
    inner = adamw(model.parameters())
    optimizer = Lookahead(inner)
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        optimizer.step(lambda: compute_again(model, optimizer, *data(50)))
    return [*state_of(inner), *state_of(optimizer)]


def evaluated_by_threads(model, module, data):
    optimizer = adamw(model.parameters())
    x = torch.linspace(-1, 1, 13, dtype=torch.float64)

    @torch.no_grad()
    def evaluate(factor):
        return module(factor * x)

    for step in range(2):
        step_once(model, optimizer, *data(step))
        with ThreadPoolExecutor(3) as threads:
            outputs = list(threads.map(evaluate, range(60)))
    return outputs


def new_group(model, module, data):
    optimizer = adamw(module.last.parameters())
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": [*module.middle.parameters()], "lr": 1e-3})
        model.zero_grad()
        x, y = data(step)
        loss_of(model(x), y).backward()
        optimizer.step()


def load_midway(model, module, data):
    optimizer, kept = adamw(model.parameters()), None
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if step == 1:
            kept = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == 3:
            module.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])


def load_before_the_first_forward(model, module, data):
    optimizer = adamw(model.parameters())
    other = copy.deepcopy(Net())
    kept = adamw(other.parameters())
    for step in range(2):
        x, y = Data(data.world, False)(step)
        step_once(other, kept, x, y)
    module.load_state_dict(other.state_dict())
    optimizer.load_state_dict(kept.state_dict())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
    return state_of(optimizer)


def first_saves_alone(model, module, data, changes=False):
    optimizer, saved = adamw(model.parameters()), []
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if changes:
            with torch.no_grad():
                module.last.bias.mul_(0.5)
                module.first.bias.data.mul_(0.5)
        if step == 2 and data.is_first:
            time.sleep(0.1 * data.is_own)  # the others are in their next backward, or in a barrier
            saved += [tensor.clone() for tensor in state_of(optimizer)]
            saved += [value.clone() for value in module.state_dict().values()]
        if changes:
            data.barrier()
    return saved


def first_evaluates_alone(model, module, data):
    optimizer, outputs = adamw(model.parameters()), []
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if step == 2 and data.is_first:
            module.eval()
            with torch.no_grad():
                x, _ = Data(data.world, False)(50)
                outputs.append(module(x))
            module.train()
    return outputs


def adversaries(model, module, data):
    other = Net(seed=7)
    rival = DistributedDataParallel(other) if data.is_own else other
    own, their = adamw(module.parameters()), adamw(other.parameters())
    for step in range(STEPS):
        x, y = data(step)
        own.zero_grad()
        (loss_of(model(x), y) + 0.1 * rival(x).square().mean()).backward()
        own.step()
        their.zero_grad()
        (loss_of(rival(x), y) + 0.1 * model(x).detach().square().mean()).backward()
        their.step()
    return [parameter.detach().clone() for parameter in other.parameters()]


def recompute(model, module, data, use_reentrant):
    optimizer = adamw(model.parameters())
    forward = module.middle.forward
    module.middle.forward = lambda h: checkpoint(forward, h, use_reentrant=use_reentrant)
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
    del module.middle.forward


def copies(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if step == 1:
            weights = [p.detach().clone() for p in copy.deepcopy(module).parameters()]
    return weights


def in_eval_mode(model, module, data):
    optimizer = adamw(model.parameters())
    model.eval()
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))


def frozen_and_unfrozen(model, module, data):
    optimizer = adamw(model.parameters())
    for step in range(6):
        module.first.requires_grad_(step % 3 != 1)
        step_once(model, optimizer, *data(step))


LOOPS = {
    name: loop
    for loop in (
        *(two_forwards, two_forwards_and_a_backward, used_by_one_rank, two_optimizers),
        *(created_late, average, average_by_hand, clamp, change_data, new_group, load_midway),
        *(load_before_the_first_forward, first_saves_alone, first_evaluates_alone, adversaries),
        *(copies, in_eval_mode, frozen_and_unfrozen, change_by_numpy, a_step_inside_a_step),
        evaluated_by_threads,
    )
    if (name := loop.__name__)
} | {
    "first_saves_changes_alone": partial(first_saves_alone, changes=True),
    "recompute": partial(recompute, use_reentrant=False),
    "recompute_reentrant": partial(recompute, use_reentrant=True),
}


TELLING_LOOPS = {"two_forwards", "change_by_numpy", "a_step_inside_a_step"}


@further_sizes
@also_whole
@pytest.mark.parametrize("name", by_default(LOOPS, TELLING_LOOPS))
def test_a_loop(world, owners, name):
    compare(world, LOOPS[name])


@pytest.mark.parametrize("has_room", [True, False])
def test_freed_memory_is_returned_if_there_is_none_to_spare(
    world, installed, monkeypatch, has_room
):
    calls = []
    monkeypatch.setattr(CpuDevice, "return_large_blocks", lambda _: calls.append("return"))
    give(monkeypatch, world, SHARES, True, prefetches=has_room)
    model = DistributedDataParallel(Net())
    loss_of(model(torch.ones(2, 13).double()), torch.tensor([0, 1])).backward()
    assert len(calls) == (not has_room)


@further_sizes
def test_a_step_calls_few_functions_for_each_parameter(world, installed, monkeypatch):
    """Beyond those of the same step without ranks; most are of C, and take as long as Python's."""
    monkeypatch.setattr(
        trainer_shards,
        "find_owners",
        lambda *_: Owners(without_mirrors(SHARES[: world.size]), frozenset(), True, ""),
    )
    layers = [nn.Linear(4, 4) for _ in range(100)]
    model = nn.Sequential(*layers)
    calls = []
    for module in (copy.deepcopy(model), DistributedDataParallel(model)):
        optimizer = adamw(module.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            with cProfile.Profile() as profile:
                module(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    parameters = 2 * len(layers)
    assert (calls[1] - calls[0]) / parameters <= 80


def test_a_thread_beside_a_forward_is_refused(world, installed, monkeypatch):
    give(monkeypatch, world, SHARES, True)
    model = Net()
    ddp = DistributedDataParallel(model)
    errors = []

    def use(*_):
        with ThreadPoolExecutor(1) as threads:
            errors.append(threads.submit(lambda: model.last.weight * 1).exception())

    for _ in range(2):
        hook = model.middle.register_forward_hook(use)
        loss = loss_of(ddp(torch.ones(2, 13).double()), torch.tensor([0, 1]))
        hook.remove()
        assert re.search("last.weight is used by a thread while another", str(errors[-1]))
        loss.backward()
        use()
        assert errors[-1] is None


def test_replaced_data_is_followed_or_refused(world, owners):
    def train(model, module, data):
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            step_once(model, optimizer, *data(step))
            for parameter in module.parameters() if step == 2 else ():
                parameter.data = parameter.data.clone() * 0.5

    if owners == "whole":
        compare(world, train)
        return
    with pytest.raises(UserError, match=r"\.data was set, but the parameter is sharded"):
        compare(world, train)


@pytest.mark.parametrize(
    "owns", [pytest.param((1.0, 0.0, 2.0, 1.0), marks=pytest.mark.thorough), (0.0, 1.0, 0.0, 0.0)]
)
def test_a_rank_that_owns_nothing(world, installed, monkeypatch, owns):
    if world.size == 1:
        pytest.skip("one rank owns all")
    for is_sharded in (False, True):
        give(monkeypatch, world, owns, is_sharded)
        compare(world, LOOPS["first_saves_alone"])


@also_whole
def test_autocast(world, owners):
    def train(model, module, data):
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(x.float()), y)
            loss.backward()
            optimizer.step()

    compare(world, train, tolerance=5e-3, make=lambda: Net().float())


class Tied(nn.Module):
    """Embeds and scores with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.scores = nn.Embedding(7, 13), nn.Linear(13, 7, bias=False)
        self.scores.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        return self.scores(torch.tanh(x) @ self.embedding.weight.T @ self.embedding.weight)


@also_whole
def test_tied_weights_are_saved_once(world, owners, tmp_path):
    def train(model, module, data):
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            step_once(model, optimizer, *data(step))
        state = module.state_dict()
        one, other = state["embedding.weight"], state["scores.weight"]
        torch.save(state, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        assert one.data_ptr() == other.data_ptr()
        pointers = {value.untyped_storage().data_ptr() for value in saved.values()}
        assert len(pointers) == 1
        return [*saved.values()]

    compare(world, train, make=Tied)


class Adapted(nn.Module):
    """A frozen base with adapters of low rank."""

    def __init__(self):
        super().__init__()
        self.base = Net().requires_grad_(False)
        self.down, self.up = nn.Linear(13, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@also_whole
def test_adapters_of_a_frozen_base(world, owners):
    def train(model, module, data):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = adamw(trained)
        for step in range(STEPS):
            step_once(model, optimizer, *data(step))
        return [*module.state_dict().values(), *state_of(optimizer)]

    compare(world, train, make=Adapted)


@pytest.mark.thorough
@pytest.mark.parametrize("is_inside", [False, True])
def test_compiled_models(world, installed, monkeypatch, is_inside):
    def train(model, module, data):
        optimizer = adamw(model.parameters())
        compiled = model if is_inside else torch.compile(model, backend="eager")
        for step in range(3):
            step_once(compiled, optimizer, *data(step))

    def make():
        return torch.compile(Net(), backend="aot_eager") if is_inside else Net()

    give(monkeypatch, world, SHARES, is_sharded=False)
    try:
        compare(world, train, make=make)
    finally:
        torch._dynamo.reset()  # compiled code in use is refused when parameters are sharded


class Buffered(Net):
    """Has buffers, one of them twice, and a tied weight."""

    def __init__(self, seed=1):
        super().__init__(seed)
        self.register_buffer("offsets", torch.randn(7, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.last.offsets = nn.Buffer(self.offsets)
        self.some.weight = self.middle.weight
        self.norm = nn.BatchNorm1d(13, dtype=torch.float64, momentum=None)

    def forward(self, x, some=False):
        if not self.training:
            x = self.norm(x)
        return super().forward(x, some=True) + self.last.offsets / self.count


def evaluated_first(model, module, data):
    """As by Lightning's sanity check; then each rank loads what it has."""
    optimizer = adamw(model.parameters())
    with torch.no_grad():
        module.eval()
        results = [module(Data(data.world, False)(50)[0])]
        module.train()
    data.barrier()
    state = module.state_dict()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    results += [value.detach().clone() for value in copy.deepcopy(module).state_dict().values()]
    module.load_state_dict({name: value * 0.9 for name, value in state.items()})
    results += [value.clone() for value in state.values()]
    for step in range(2):
        step_once(model, optimizer, *data(step))
    results += [value.clone() for value in state.values()]
    return [*results, *state_of(optimizer)]


ON_META = {"evaluated_first": evaluated_first} | {
    name: LOOPS[name] for name in ("first_saves_alone", "created_late", "average")
}


@further_sizes
@pytest.mark.parametrize("name", by_default(ON_META, ("evaluated_first",)))
@pytest.mark.parametrize("are_large", by_default([False, True], [True]))
def test_a_model_with_values_on_rank_0_only(world, owners, monkeypatch, name, are_large):
    if are_large:
        monkeypatch.setattr(host_parameters, "is_worth_sharding", can_be_sharded)
    begins = "cpu" if world.rank in (0, 3) else "meta"
    with torch.device(begins):
        model = Buffered()
    optimizer = adamw(model.parameters()) if name == "average" else None
    model.to("cpu")
    assert model.last.weight.device.type == begins
    compare(world, ON_META[name], make=Buffered, model=model)
    assert optimizer is None or optimizer.param_groups[0]["params"] == [*model.parameters()]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_without_values_on_rank_0_is_refused(world, installed, is_first):
    options = {} if is_first else {"init_sync": False}
    if (is_first and world.rank > 0) or (world.size == 1 and not is_first):
        return
    with torch.device("meta"):
        model = Buffered()
    with pytest.raises(UserError, match=r"first\.weight is on meta on rank \d, without values"):
        DistributedDataParallel(model, **options)


def test_state_that_was_made_on_meta_is_refused(world, owners):
    with torch.device("meta" if world.rank else "cpu"):
        model = Net()
    optimizer = torch.optim.Adagrad(model.parameters())
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ends = contextlib.nullcontext() if world.rank == 0 else pytest.raises(UserError, match="after")
    with ends:
        ddp(Data(world, True)(0)[0])
    dist.barrier()
    del optimizer


def test_other_forms_than_those_of_rank_0_are_refused(world, installed, monkeypatch):
    if world.size == 1:
        pytest.skip("one rank is rank 0")
    for are_large in (False, True):
        if are_large:
            monkeypatch.setattr(host_parameters, "is_worth_sharding", can_be_sharded)
        with torch.device("meta" if world.rank else "cpu"):
            model = nn.Linear(5, 3)
        if world.rank == 0:
            model.double()
        with pytest.raises(AgreedError, match=r"differs between ranks: .*create the same model"):
            DistributedDataParallel(model)


@also_whole
def test_rows_may_change_while_they_are_sent(world, owners):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(ddp(Data(world, True)(0)[0]), Data(world, True)(0)[1]).backward()
    if owners == "sharded":
        (shards,) = extend_ddp._active
        rows = shards.model_of(model.first.weight).rows
        number, before = 0, model.first.weight.detach().clone()
        served = rows.serve(number, *rows.version(number))
        with torch.no_grad():
            model.first.weight.mul_(2)
        for begin, end, values in served:
            torch.testing.assert_close(values, before[begin:end])
    dist.barrier()


class Layers(nn.Module):
    """16 MB of parameters, of 1 MB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(16))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.sizes(3)
def test_only_rank_0_ever_has_the_model_whole(world, installed, monkeypatch):
    """Each peak is at most the owned rows, 4 of the largest parameters and what MPI allocates.

    As where memory is short: else what malloc has kept of earlier models counts, or hides others.
    """
    give(monkeypatch, world, (2.0, 1.0, 1.0), is_sharded=True, prefetches=False)
    whole, largest, spare = 16 * MB, MB, 4 * MB
    dist.all_reduce(torch.ones(MB))  # for what the first call allocates permanently
    dist.barrier()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, _ = in_memory()
    with torch.device("meta" if world.rank else "cpu"):
        model = Layers()
    ddp = DistributedDataParallel(model)
    output = ddp(torch.ones(2, 512))
    share = 0.5 if world.rank == 0 else 0.25
    at_most = whole * (1 if world.rank == 0 else share) + 4 * largest + spare
    assert in_memory()[1] - before < at_most
    output.sum().backward()
    dist.barrier()


@also_whole
def test_a_loaded_state_takes_the_memory_of_its_rows_only(world, owners):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    step_once(ddp, optimizer, *Data(world, True)(0))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        for value in state.values():
            assert value.untyped_storage().nbytes() == value.nbytes
    dist.barrier()


@pytest.mark.thorough
@pytest.mark.parametrize("saves", [8, 100])
def test_rank_0_saves_while_the_others_are_in_a_backward(world, owners, tmp_path, saves):
    """No save waits for a rank that waits for rank 0, and each shows its own step."""

    def train(model, module, data):
        optimizer, saved = adamw(model.parameters()), []
        for step in range(saves):
            step_once(model, optimizer, *data(step))
            if data.is_first:
                state = module.state_dict(), optimizer.state_dict()
                if data.is_own:
                    time.sleep(0.002 * (step % 3))
                    torch.save(state, tmp_path / "saved.pt")
                    state = torch.load(tmp_path / "saved.pt", weights_only=True)
                places = sorted(state[1]["state"])
                saved += [state[0]["last.weight"].clone()]
                saved += [state[1]["state"][place]["exp_avg"].clone() for place in places]
        return saved

    compare(world, train)


@also_whole
def test_a_gradient_is_not_read_in_silence(world, owners):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    x, y = Data(world, True)(0)
    loss_of(ddp(x), y).backward()
    with pytest.raises(UserError, match=r"use torch\.nn\.utils\.clip_grad_norm_"):
        model.last.weight.grad.norm()


@pytest.mark.sizes(2, 3)
@also_whole
def test_a_norm_on_one_rank_is_named(world, owners, monkeypatch):
    """Plain DDP has whole gradients on each rank, so scripts log their norm on rank 0 alone."""
    monkeypatch.setattr(script_calls, "_SPEAKER_SEC", 0)
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    loss_of(ddp(Data(world, True)(0)[0]), Data(world, True)(0)[1]).backward()
    with pytest.raises(
        UserError, match=r"get_total_norm\(\) on rank 0, optimizer\.step\(\) on rank"
    ):
        total_norm(model.parameters()) if world.rank == 0 else optimizer.step()
    dist.barrier()


@also_whole
def test_a_model_is_deleted_while_another_rank_reads_it(world, owners):
    model = Net()
    reference = copy.deepcopy(model)
    for ddp, data in (
        (DistributedDataParallel(model, find_unused_parameters=True), Data(world, True)),
        (reference, Data(world, False)),
    ):
        optimizer = adamw(ddp.parameters())
        step_once(ddp, optimizer, *data(0))
    if world.rank:
        del model, ddp, optimizer
        gc.collect()
        return
    time.sleep(0.2)
    values = [value.clone() for value in model.state_dict().values()]
    expected = reference.state_dict().values()
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@also_whole
def test_a_deleted_model_is_freed_before_the_next_one_has_owners(world, owners):
    """Which are chosen by the memory that is left; of rows, gradients and an optimizer's state."""
    (shards,) = extend_ddp._active
    model = Net()
    model.never = nn.Linear(1024, 1024).double()  # smaller ones wait for Python's own search
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(ddp.parameters())
    step_once(ddp, optimizer, *Data(world, True)(0))
    kept = weakref.ref(shards.model_of(model.last.weight).rows)
    kept_state = weakref.ref(shards.optimizers.get(optimizer).state)
    del model, ddp, optimizer
    gc.collect()
    assert kept() is not None  # another rank may still read it
    assert kept_state() is not None
    DistributedDataParallel(Net(), find_unused_parameters=True)(Data(world, True)(0)[0])
    assert kept() is None
    assert kept_state() is None


def late_with_scaler(model, module, data):
    """The scaler is the first that looks at an optimizer which was created after a forward."""
    loss_of(model(data(0)[0]), data(0)[1]).backward()
    model.zero_grad()
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(data(step)[0]), data(step)[1])).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def scaler_of_two_optimizers(model, module, data):
    """An infinite gradient, which the script clears or which is another optimizer's, is none."""
    first = adamw(module.first.parameters())
    second = adamw([*module.middle.parameters(), *module.last.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        for optimizer in (first, second):
            optimizer.zero_grad()
        x, y = data(step)
        handle = module.first.bias.register_hook(lambda gradient: gradient * torch.inf)
        scaler.scale(loss_of(model(x), y)).backward()
        handle.remove()
        if step == 1:
            module.first.bias.grad.zero_()
            module.first.bias.grad.nan_to_num_(0.0)
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()


def group_of_another_model(model, module, data):
    """The optimizer of one model gets the parameters of another one."""
    other = Net(seed=3)
    rival = DistributedDataParallel(other, find_unused_parameters=True) if data.is_own else other
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        (loss_of(model(x), y) + loss_of(rival(x), y)).backward()
        if step == 2:
            optimizer.add_param_group({"params": [*other.parameters()], "lr": 3e-3})
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return [*(p.detach().clone() for p in other.parameters()), *state_of(optimizer)]


def wrapped_again(model, module, data):
    """As by a trainer whose `fit` is called twice."""
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        if step == 2 and data.is_own:
            model.zero_grad()
            with torch.no_grad():
                module.last.bias.sum().item() if data.is_first else None
            model = DistributedDataParallel(module, find_unused_parameters=True)
        step_once(model, optimizer, *data(step))
    return state_of(optimizer)


def changed_after_its_gather(model, module, data):
    """What was gathered ahead is not used after the script has changed the values."""
    optimizer = adamw(module.parameters())
    for step in range(STEPS + 2):
        x, y = data(step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if step == STEPS:
            model(x)  # a forward without a backward, before the values change
        optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    for parameter in module.parameters():
        parameter.data.mul_(0.9)
    loss.backward()
    optimizer.step()


def state_reset(model, module, data):
    """The ways in which scripts reset or change an optimizer's state by themselves."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if step == 0:
            optimizer.state.clear()
        if step == 1:
            optimizer.state = collections.defaultdict(dict)
        if step == 3:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
    data.barrier()  # else another rank may read it before
    return state_of(optimizer)


def copy_of_an_optimizer(model, module, data):
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        step_once(model, optimizer, *data(step))
        if step == 1:
            kept = copy.deepcopy(optimizer)
        if step == 2:
            optimizer.load_state_dict(kept.state_dict())
    return state_of(optimizer)


def state_dict_of_an_earlier_step(model, module, data):
    optimizer, clones = adamw(module.parameters()), []
    states = [module.state_dict(), model.state_dict(), module.middle.state_dict()]
    for step in range(3):
        step_once(model, optimizer, *data(step))
        if step == 0:
            states.append(module.state_dict())
        clones += [value.clone() for state in states for value in state.values()]
    return [*clones, *copy.deepcopy(states[0]).values()]


def state_dict_beside_parameters(model, module, data):
    """The values of a state_dict are used together with the parameters that it is of."""
    optimizer = adamw(module.parameters())
    for step in range(2):
        step_once(model, optimizer, *data(step))
    module.load_state_dict(module.state_dict())
    state = module.state_dict()
    with torch.no_grad():
        differences = [state[name] - 0.5 * p for name, p in module.named_parameters()]
        torch._foreach_lerp_([*module.parameters()], differences, 0.5)
        module.last.bias.copy_(state["last.bias"] * 0.5)
        module.last.weight.add_(state["last.weight"])
    step_once(model, optimizer, *data(2))
    return differences


def copied_by_one_rank(model, module, data):
    """As an average of weights on rank 0 only; the ranks have another model later."""
    optimizer = adamw(module.parameters())
    step_once(model, optimizer, *data(0))
    if data.is_first:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    other = Net(seed=3)
    rival = DistributedDataParallel(other, find_unused_parameters=True) if data.is_own else other
    step_once(rival, adamw(other.parameters()), *data(1))
    step_once(model, optimizer, *data(2))
    if not data.is_first:
        return []
    averaged.update_parameters(model)
    return [*other.parameters(), *averaged.module.parameters()]


def averaged_in_a_hook(model, module, data):
    """In a hook of the optimizer after its step."""
    optimizer = adamw(module.parameters())
    averages = [p.detach().clone() for p in module.parameters()]

    def average(*_):
        torch._foreach_lerp_(averages, [p.detach() for p in module.parameters()], 0.5)

    optimizer.register_step_post_hook(average)
    for step in range(3):
        step_once(model, optimizer, *data(step))
    return averages


def kept_groups(model, module, data):
    """As an optimizer that shares another one's groups, or a schedule by hand."""
    optimizer = adamw(module.parameters())
    groups = optimizer.param_groups
    for step in range(3):
        groups[0]["lr"] = 0.01 / (step + 1)
        step_once(model, optimizer, *data(step))
    return [p.detach().clone() for p in groups[0]["params"]]


def changed_after_wrapping(model, module, data):
    """Ties a layer, removes a parameter and prunes: the parameters get other numbers."""
    optimizer = adamw(module.parameters())
    module.some.weight = module.middle.weight
    module.first.bias = None
    prune.l1_unstructured(module.middle, "bias", 0.3)
    for step in range(4):
        module.last.requires_grad_(step != 2)
        optimizer.zero_grad()
        x, y = data(step)
        loss_of(model(x, some=True), y).backward()
        optimizer.step()
    return [*module.state_dict().values()]


def kept_data(model, module, data):
    optimizer = adamw(module.parameters())
    for step in range(3):
        step_once(model, optimizer, *data(step))
        torch._foreach_mul_([parameter.data for parameter in module.parameters()], 0.9)
        if step == 1:
            kept = [parameter.data for parameter in module.parameters()]
            module.state_dict()
            for values in kept:
                values.mul_(0.9)


def thrown_away_under_no_sync(model, module, data):
    """As of a discriminator when the generator is trained."""
    optimizer = adamw(module.parameters())
    for step in range(3):
        with model.no_sync() if data.is_own else contextlib.nullcontext():
            loss_of(model(data(step + 50)[0]), data(step)[1]).backward()
        optimizer.zero_grad(set_to_none=step == 1)
        loss_of(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()


def unfrozen_before_clearing(model, module, data):
    optimizer = adamw(module.parameters())
    module.first.requires_grad_(False)
    for step in range(4):
        if step == 2:
            module.first.requires_grad_(True)
        x, y = data(step)
        loss = loss_of(model(x), y)
        if step != 2:  # there, it adds to the gradients of the step before
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


FOUND = {
    loop.__name__: loop
    for loop in (
        *(late_with_scaler, scaler_of_two_optimizers, group_of_another_model, wrapped_again),
        changed_after_its_gather,
        *(state_reset, copy_of_an_optimizer, state_dict_of_an_earlier_step, kept_data),
        *(state_dict_beside_parameters, copied_by_one_rank, changed_after_wrapping),
        *(averaged_in_a_hook, kept_groups),
        *(thrown_away_under_no_sync, unfrozen_before_clearing),
    )
}


FURTHER_FOUND = {
    *("state_dict_of_an_earlier_step", "late_with_scaler", "scaler_of_two_optimizers"),
    *("kept_groups", "averaged_in_a_hook"),
}


@further_sizes
@also_whole
@pytest.mark.parametrize("name", by_default(FOUND, FOUND.keys() - FURTHER_FOUND))
def test_what_scripts_do_beside_steps(world, owners, name):
    compare(world, FOUND[name])


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    count: int = 7


class Output(dict):
    """As those of many libraries."""


class Returning(Net):
    """Returns its scores in an object, and a parameter of its own."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap
        self.spread = nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, x):
        return self.wrap(super().forward(x)), self.spread


@further_sizes
@also_whole
@pytest.mark.parametrize(
    "wrap",
    [
        Scores,
        lambda scores: Output(scores=scores),
        pytest.param(lambda scores: UserDict(scores=scores), marks=pytest.mark.thorough),
    ],
)
def test_outputs_in_objects_and_parameters(world, owners, wrap):
    def train(model, module, data):
        optimizer = adamw(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                adds = micro == 0 and data.is_own
                with model.no_sync() if adds else contextlib.nullcontext():
                    x, y = data(2 * step + micro)
                    output, spread = model(x)
                    scores = output.scores if isinstance(output, Scores) else output["scores"]
                    # The gradient of the parameter comes before that of the scores.
                    loss_of(scores * (2 * spread).exp(), y).backward()
            optimizer.step()

    compare(world, train, make=lambda: Returning(wrap))


def test_a_graph_of_before_there_are_owners_does_not_compute_nan(world, owners):
    """As a penalty on weights that is computed before the first forward."""
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    penalty = model.last.weight.square().sum()
    x, y = Data(world, True)(0)
    loss = loss_of(ddp(x), y) + penalty
    if owners == "whole":
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def set_gradient(ddp, module, optimizer, x, y):
    module.last.bias.grad = torch.ones(7, dtype=torch.float64)
    optimizer.step()


def put_back_gradient(ddp, module, optimizer, x, y):
    kept = module.last.bias.grad
    optimizer.zero_grad()
    loss_of(ddp(x), y).backward()
    module.last.bias.grad = kept
    optimizer.step()


def step_before_the_first_forward(ddp, module, optimizer, x, y):
    other = wrapped(Net())
    loss_of(other.module(x), y).backward()
    adamw(other.parameters()).step()


def step_in_hook(ddp, module, optimizer, x, y):
    module.first.bias.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    loss_of(ddp(x), y).backward()


def failed_backward(ddp, module, optimizer, x, y):
    def fail(gradient):
        raise ValueError("no gradient")

    loss = loss_of(ddp(x), y)
    module.last.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.step()


def step_without_sync(ddp, module, optimizer, x, y):
    with ddp.no_sync():
        loss_of(ddp(x), y).backward()
    optimizer.step()


def norm_of_order_zero(ddp, module, optimizer, x, y):
    nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type=0)


def state_of_a_parameter(ddp, module, optimizer, x, y):
    optimizer.step()
    optimizer.state[module.last.bias]["exp_avg"]


def other_wrap(ddp, module, optimizer, x, y):
    DistributedDataParallel(nn.Sequential(module, nn.Linear(7, 7)))


def converted(ddp, module, optimizer, x, y):
    optimizer.step()
    optimizer.zero_grad()
    module.float()
    optimizer.step()


def wrapped(model=None, **options):
    return DistributedDataParallel(model or Net(), find_unused_parameters=True, **options)


def hook_of_communication(ddp, module, optimizer, x, y):
    ddp.register_comm_hook(None, lambda state, bucket: None)


def join(ddp, module, optimizer, x, y):
    ddp.join()


def mixed_precision(ddp, module, optimizer, x, y):
    precision = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    DistributedDataParallel(Net().float(), mixed_precision=precision)


def delayed(ddp, module, optimizer, x, y):
    other = Net()
    wrapped(
        other,
        delay_all_reduce_named_params=[("last.bias", other.last.bias)],
        param_to_hook_all_reduce=other.last.weight,
    )


def lbfgs(ddp, module, optimizer, x, y):
    other = wrapped()
    torch.optim.LBFGS(other.parameters()).step(lambda: loss_of(other(x), y))


def gradient_of_gradients(ddp, module, optimizer, x, y):
    loss_of(ddp(x), y).backward(create_graph=True)


def sparse_gradient(ddp, module, optimizer, x, y):
    DistributedDataParallel(nn.Embedding(5, 3, sparse=True))(torch.tensor([1])).sum().backward()


def complex_parameter(ddp, module, optimizer, x, y):
    DistributedDataParallel(nn.Linear(3, 2, dtype=torch.complex64))


def past_the_forward(ddp, module, optimizer, x, y):
    loss_of(module(x), y).backward()


def scaled_rows(ddp, module, optimizer, x, y):
    DistributedDataParallel(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)))


def assigned(ddp, module, optimizer, x, y):
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    ddp(x)


def frozen_after_pruning(ddp, module, optimizer, x, y):
    other = Net()
    other.first.requires_grad_(False)
    rival = wrapped(other)
    loss_of(rival(x), y).backward()
    prune.identity(other.middle, "weight")
    other.first.requires_grad_(True)
    rival(x)


def called_with_others(ddp, module, optimizer, x, y):
    others = {f"module.{name}": 2 * p for name, p in module.named_parameters()}
    torch.func.functional_call(ddp, others, (x,))


class Hidden:
    """An output in which no tensor is found."""

    def __init__(self, value):
        self.value = value


def hidden_output(ddp, module, optimizer, x, y):
    other = nn.Linear(13, 7).double()
    other.register_forward_hook(lambda module, inputs, output: Hidden(output))
    wrapped = DistributedDataParallel(other)
    loss_of(wrapped(x).value, y).backward()


REFUSALS = [
    (hook_of_communication, "register_comm_hook; remove it"),
    (join, "join; remove it"),
    (mixed_precision, "use torch.autocast"),
    (delayed, "delay_all_reduce_named_params; remove it"),
    (lbfgs, "does not support LBFGS"),
    (gradient_of_gradients, "create_graph=True"),
    (sparse_gradient, "sparse"),
    (complex_parameter, "complex parameters: weight"),
    (past_the_forward, "call the wrapped model"),
    (hidden_output, "return tensors, or dicts"),
    (set_gradient, "the .grad of a parameter was set"),
    (put_back_gradient, "the .grad of a parameter was set"),
    (step_before_the_first_forward, "the .grad of a parameter was set"),
    (step_in_hook, "in a hook of its own backward"),
    (failed_backward, r"a backward has failed on rank \d after 0 optimizer steps"),
    (step_without_sync, "leave no_sync"),
    (norm_of_order_zero, "does not support norms of order 0"),
    (state_of_a_parameter, r"use optimizer.state_dict\(\)"),
    (other_wrap, "parameters in two models"),
    (converted, "convert"),
    (scaled_rows, "max_norm of an embedding: 0;"),
    (assigned, r"first\.weight is another tensor .* without assign=True"),
    (called_with_others, r"first\.weight is another tensor .* functional_call"),
    (frozen_after_pruning, "after others were added, removed, tied or pruned"),
]


@further_sizes
@also_whole
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(("mistake", "message"), REFUSALS)
def test_mistakes_are_refused(world, owners, mistake, message):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    x, y = Data(world, True)(0)
    loss_of(ddp(x), y).backward()
    with pytest.raises(UserError, match=message):
        mistake(ddp, model, optimizer, x, y)
    dist.barrier()


def test_values_of_a_state_dict_are_not_changed_in_silence(world, owners):
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(ddp(Data(world, True)(0)[0]), Data(world, True)(0)[1]).backward()
    if owners == "sharded":
        with pytest.raises(UserError, match="values of a state_dict were changed in place"):
            model.state_dict()["last.bias"].mul_(2)
    dist.barrier()


@also_whole
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_state_dict", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_kept_tensor_that_no_longer_follows_is_reported(world, owners, is_state_dict, is_early):
    """Nothing is said of a `state_dict`, which follows."""
    model, data = Net(), Data(world, True)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model.parameters())
    if not is_early:
        step_once(ddp, optimizer, *data(0))
    kept = model.state_dict() if is_state_dict else [p.data for p in model.parameters()]
    reports = contextlib.nullcontext()
    if owners == "sharded" and not is_state_dict:
        reports = pytest.warns(UserWarning, match=r"shares the memory of first\.weight, but")
    with reports:
        for step in (1, 2):
            step_once(ddp, optimizer, *data(step))
    dist.barrier()
    del kept


def test_a_state_dict_of_before_a_move_keeps_the_values(installed, monkeypatch):
    """As that of a model which is moved to an accelerator, where it has other memory."""
    device = torch.device("cpu")
    monkeypatch.setattr(host_parameters, "is_worth_sharding", can_be_sharded)
    monkeypatch.setattr(Placement, "device_to_spare", lambda *_: device)
    model = nn.Linear(3, 3)
    state = model.state_dict()
    before = copy.deepcopy(state)
    model.to(device)
    with torch.no_grad():
        model.weight.mul_(2)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict()["weight"] + 0, before["weight"] * 2)


def test_calls_are_compared_in_a_round_but_for_its_backward(world):
    calls = ScriptCalls(world.comm, lambda _: contextlib.nullcontext())
    calls.announce(ScriptCall.STEP, 0, 0)
    with calls.waiting_in_round("the parameters"):
        pass
    if world.rank == 0:  # whose backward has begun first
        calls.announce(ScriptCall.SUM, 0, 1)
        with calls.waiting_in_round("the parameters"):
            pass
    world.comm.Barrier()
    if world.rank > 0:
        calls.announce(ScriptCall.SUM, 0, 1)
    calls.check()
    calls.close()


@pytest.mark.sizes(2, 3)
def test_an_interrupted_read_delays_no_other(world):
    """As by Ctrl-C in a notebook; the owner's thread has begun to send a long reply."""
    rows = [RowValues(0, 2, torch.full((2, 1 << 18), 1.0 + world.rank))]
    reads = RemoteReads(world.comm, lambda: rows)
    if world.rank > 0:
        own_tags, reads._tags = reads._tags, itertools.repeat(1)
        with pytest.raises(RuntimeError, match="owns other rows"):
            reads.read_rows(0, into=[RowValues(0, 1, torch.empty(1, 1 << 18))])
        reads._tags = itertools.chain([1], own_tags)  # the tags begin again
        received = torch.empty_like(rows[0].values)
        for _ in range(2):
            reads.read_rows(0, into=[RowValues(0, 2, received.zero_())])
            assert received.mean() == 1
    reads.close()


def test_parameters_that_ddp_ignores_are_refused(world, installed):
    model = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.bias"])
    with pytest.raises(UserError, match=r"a parameter that DDP ignores: last\.bias"):
        DistributedDataParallel(model)
