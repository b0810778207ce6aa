"""Sharded parameters are whole while they are used, and no longer; and which can be sharded."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef

from kaitian_mpi.distributed.sharded_model import ShardedModel, check_without_torch_func
from kaitian_mpi.errors import UserError
from kaitian_mpi.train.layouts.shard.row_states import cut_state, join_states, keep_rows
from kaitian_mpi.train.layouts.shard.shards import steps_by_element


class Owner:
    """Has the values of a model's parameters, all of which are sharded."""

    def __init__(self, model):
        self.values = [p.detach().clone() for p in model.parameters()]
        self.sharded = ShardedModel(model, range(len(self.values)), torch.device("cpu"))
        self.sharded.shard([])

    def give(self, number):
        return self.values[number].clone()

    def keep(self, number, values):
        self.values[number].copy_(values)

    def __enter__(self):
        self.sharded.begin(self.give, self.keep)
        return self.sharded

    def __exit__(self, *_):
        self.sharded.end()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_cast_of_a_parameter_stays(is_frozen):
    """Autocast would keep one of each in its cache, and autograd one of each for backward."""
    torch.manual_seed(5)
    layers = [nn.Linear(24, 24).requires_grad_(not is_frozen) for _ in range(6)]
    model = nn.Sequential(nn.Linear(3, 24), *layers)
    one, inputs = copy.deepcopy(model), torch.randn(24, 3)  # activations are as large as weights

    def compute(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).square().mean()
        loss.backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(inputs), [p.grad for p in model.parameters()]

    owner = Owner(model)
    kept, pack = [], owner.sharded._notes.pack

    def watch(tensor):
        saved = pack(tensor)
        if saved is tensor and tensor.shape in ((24, 24), (24, 3)):
            kept.append(tensor)
        return saved

    owner.sharded._notes.pack = watch
    with owner:
        found, gradients = compute(model)
    expected, others = compute(one)
    weights = [value.bfloat16() for value in owner.values]
    for tensor in kept:
        for same in (tensor, tensor.t()):
            assert not any(same.shape == w.shape and torch.equal(same, w) for w in weights)
    assert kept  # the activations
    assert torch.equal(found, expected)
    for own, other in zip(gradients, others, strict=True):
        assert own is other is None or torch.equal(own, other)


def test_autocast_keeps_no_parameter_in_its_cache():
    model = nn.Sequential(*[nn.Linear(24, 24, bias=False) for _ in range(4)])
    owner, casts = Owner(model), []
    pack = owner.sharded._notes.pack

    def watch(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.shape == (24, 24):
            casts.append(StorageWeakRef(tensor.untyped_storage()))
        return pack(tensor)

    owner.sharded._notes.pack = watch
    with owner, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 24, requires_grad=True))
        assert len(casts) == 4
        assert all(cast.expired() for cast in casts[:-1])


def test_what_is_made_like_parameters_takes_no_memory_and_has_the_right_numbers():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    owner = Owner(model)
    with owner.sharded.making_optimizers():
        adagrad = optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
        with pytest.raises(UserError, match=r"the optimizer uses the values of 0.weight"):
            [p.clone() for p in model.parameters()]
    for parameter, state in adagrad.state.items():
        assert state["sum"].shape == parameter.shape
        assert state["sum"].untyped_storage().nbytes() == 4
        assert state["sum"].flatten().tolist() == [0.5] * parameter.numel()
    with pytest.raises(UserError, match=r"0.weight is sharded"):
        torch.zeros_like(model[0].weight)


def test_the_model_is_copied_with_plain_parameters_while_it_is_whole():
    model = nn.Linear(3, 5)
    owner = Owner(model)
    with owner:
        copied = copy.deepcopy(model)
    assert [type(p) for p in copied.parameters()] == [nn.Parameter] * 2
    assert all(map(torch.equal, copied.parameters(), owner.values))


class SGD(optim.SGD):
    """Looks at whole gradients."""

    def step(self, closure=None):
        return super().step(closure)


class Named(optim.AdamW):
    """Has other settings only."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5)


class Grouped(optim.Adam):
    def _init_group(self, *args):
        return super()._init_group(*args)


def with_hook(parameters):
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_scheduler(parameters):
    optimizer = optim.RMSprop(parameters, lr=0.1)
    optimizer.scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *[(kind, True) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adamax)],
        *[(kind, True) for kind in (optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad)],
        *[(kind, True) for kind in (optim.Adadelta, optim.Rprop, optim.ASGD, Named)],
        *[(with_scheduler, True), (with_hook, False), (SGD, False), (Grouped, False)],
        *[(optim.Adafactor, False), (optim.SparseAdam, False)],
    ],
)
def test_only_what_steps_as_torch_does_by_element_has_rows_of_parameters(make, expected):
    optimizer = make([nn.Parameter(torch.ones(3, 2))])
    assert steps_by_element([optimizer]) is expected
    assert steps_by_element([optim.SGD([torch.ones(1)], lr=0.1), optimizer]) is expected


def test_gradients_of_torch_func_are_refused_while_parameters_are_in_parts():
    model = nn.Linear(3, 1)
    with Owner(model):
        assert torch.func.vmap(model)(torch.ones(2, 3)).shape == (2, 1)
        with pytest.raises(RuntimeError) as failed:
            torch.func.grad(lambda x: model(x).sum())(torch.ones(3))
        with pytest.raises(UserError, match=r"uses a gradient of torch.func"):
            check_without_torch_func(model, failed.value)
        check_without_torch_func(model, RuntimeError("another"))


def test_rows_of_a_state_that_fills_no_memory_have_memory_of_their_own():
    """As of Adagrad, which makes it along with itself; an owner may have single rows of it."""
    state = {"sum": torch.zeros(1).expand(12)}
    rows = [
        join_states([cut_state(state, (0, 0, 12), (at, at + 1))], keep_rows)["sum"] for at in (0, 6)
    ]
    rows[0].add_(1)
    assert [each.tolist() for each in rows] == [[1.0], [0.0]]
