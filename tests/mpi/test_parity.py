"""A kind of device whose kernels are wrong is named before training.

The odd ranks' module computes differently, as a device with a wrong kernel would.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from samples import linear_task
from torch import nn
from torch.nn import functional

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.train.layouts.replicate import ReplicateLayout
from kaitian_mpi.train.measure.parity import FILE
from kaitian_mpi.train.measure.plan import Profiles, profile_unmeasured
from kaitian_mpi.train.run import compare_kinds
from kaitian_mpi.train.setup import Setup

pytestmark = pytest.mark.sizes(3)


class Kernel(torch.autograd.Function):
    """Multiplies by 2; on a faulty device by something else, forward or backward."""

    @staticmethod
    def forward(ctx, x, factor, backward_factor):
        ctx.factor = backward_factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


class Network(nn.Module):
    """A small network with batch norm and dropout, and a kernel to make wrong."""

    def __init__(self, forward=2.0, backward=2.0):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.factors = forward, backward

    def forward(self, x):
        hidden = functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        hidden = Kernel.apply(torch.tanh(hidden), *self.factors)
        return self.last(hidden) * self.scalar * self.frozen


class Folder(NoFolder):
    """Keeps what is written."""

    def __init__(self):
        self.written = {}

    def write(self, name, content):
        self.written[name] = json.loads(json.dumps(content))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def run(world, model, task_loss=loss, length=40, excluded=(), parity_loss=None, **settings):
    """Check a model on samples that differ between the ranks, as by random augmentation."""
    config = TrainConfig(**settings)
    generator = torch.Generator().manual_seed(world.rank)
    data = [(torch.randn(6, generator=generator), index % 3) for index in range(length)]
    torch.manual_seed(5)
    for name, value in model.named_parameters():
        if value.requires_grad and name != "unused":
            nn.init.normal_(value)
    parts = {"data": data, "loss": task_loss, "parity_loss": parity_loss}
    task = linear_task(6, model=model, **parts)
    folder = Folder()
    profile = profile_unmeasured(config, world.info)
    profiles = Profiles({info.place: profile for info in world.infos}, min_batch=2)
    of_run = SimpleNamespace(
        config=config, layout=ReplicateLayout(), setup=Setup(task, folder), profiles=profiles
    )
    comparison = compare_kinds(of_run, excluded, world)
    return comparison, folder.written.get(FILE)


def on_odd(world, factors):
    """Return a network whose kernel is wrong on odd ranks."""
    return Network(*(factors if world.rank % 2 else (2.0, 2.0)))


WRONG_BACKWARD = 2.0, 2.4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kinds_that_compute_alike_agree(world, capsys, precision):
    torch.manual_seed(world.rank)
    before = torch.get_rng_state()
    model = Network()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.set_rng_state(before)
    comparison, content = run(world, model, precision=precision)
    assert comparison
    assert content["agrees"]
    assert [kind["kind"] for kind in content["kinds"]] == ["even", "odd"]
    assert torch.equal(model.norm.running_mean, state["norm.running_mean"])
    assert all(parameter.grad is None for parameter in model.parameters())
    printed = capsys.readouterr().out
    assert ("parity: even, odd agree with rank 0 (" in printed) == (world.rank == 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_kind_that_does_not_update_running_statistics_is_named(world, precision):
    model = Network()
    if world.rank % 2:  # as on a device that never updates them
        norm = model.norm
        norm.forward = lambda x: functional.batch_norm(x, None, None, norm.weight, norm.bias, True)
    with pytest.raises(AgreedError, match=r"more than rounding on odd .*the buffers 1\.0e"):
        run(world, model, precision=precision)


@pytest.mark.parametrize(
    ("factors", "worst"),
    [
        (WRONG_BACKWARD, "first"),
        ((2.2, 2.0), ""),  # a wrong forward
        ((float("nan"), 2.0), ""),
        ((2.0, float("nan")), "first"),
        ((2.0, 0.0), "first"),
    ],
)
def test_a_kind_with_a_wrong_kernel_is_named(world, factors, worst):
    with pytest.raises(AgreedError) as caught:
        run(world, on_odd(world, factors))
    text = str(caught.value)
    assert "more than rounding on odd (rank 1 (" in text
    assert "even (rank" not in text.partition("more than rounding")[2]
    assert worst in text.partition("fp32): ")[2]
    assert "--no-parity" in text
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_a_slightly_wrong_loss_shows_unless_a_compared_rank_rounds_as_much(world):
    def on_odd(model, batch):
        return loss(model, batch) * (1.001 if world.rank % 2 else 1.0)

    with pytest.raises(AgreedError, match=r"more than rounding on odd .*the loss 1\.0e-03"):
        run(world, Network(), on_odd)
    torch.set_float32_matmul_precision("medium" if world.rank % 2 else "highest")
    try:
        assert run(world, Network(), on_odd)[0]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_nothing_is_compared_where_it_is_not_wanted_or_of_no_use(world):
    wrong = on_odd(world, (9.0, 9.0))
    assert run(world, wrong, parity=False) == (None, None)
    odd = range(1, world.size, 2)
    assert run(world, wrong, excluded=odd) == (None, None)
    assert run(world, wrong, task_loss=None) == (None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda x: x * float("nan"), "is nan"), (lambda x: x + torch.rand(()), "random numbers")],
)
def test_a_loss_that_is_no_number_or_random_is_not_compared(world, capsys, change, said):
    assert run(world, Network(), lambda m, batch: change(loss(m, batch))) == (None, None)
    assert world.rank or "not compared, because the loss" in (out := capsys.readouterr().out)
    assert world.rank or said in out


def test_a_loss_that_the_script_computes_is_compared_if_it_is_given(world, capsys):
    wrong = on_odd(world, WRONG_BACKWARD)
    assert run(world, wrong, task_loss=None) == (None, None)
    assert ("Task(parity_loss=...)" in capsys.readouterr().out) == (world.rank == 0)
    assert run(world, Network(), task_loss=None, parity_loss=loss)[0]
    with pytest.raises(AgreedError, match="more than rounding on odd"):
        run(world, wrong, task_loss=None, parity_loss=loss)


@pytest.mark.parametrize(
    ("of_odd_ranks", "message"),
    [
        (lambda m, batch: loss(m, batch) + m.unused.sum(), r"odd .*unused"),
        (lambda m, batch: m(batch[0]), r"rank 1: the loss is a tensor of shape \[4, 3\]"),
    ],
    ids=["uses another parameter", "is a user's mistake"],
)
def test_a_loss_that_differs_between_kinds_is_an_error_on_all(world, of_odd_ranks, message):
    with pytest.raises(AgreedError, match=message):
        run(world, Network(), of_odd_ranks if world.rank % 2 else loss)


def test_a_model_for_one_dtype_is_compared_with_float32(world):
    def with_cast(model, batch):
        return loss(model, (batch[0].float(), batch[1]))

    comparison, content = run(world, Network(), with_cast)
    assert comparison
    assert content["reference"].endswith("in fp32")
    assert run(world, Network().double(), lambda m, b: loss(m, (b[0].double(), b[1])))[0]
    with pytest.raises(AgreedError, match="on odd"):
        run(world, on_odd(world, WRONG_BACKWARD), with_cast)


def test_unusual_parameters_losses_and_models(world):
    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            self.complex = nn.Parameter(torch.ones(6, dtype=torch.complex64))
            self.table = nn.Embedding(5, 6, sparse=True)

        def forward(self, x):
            index = torch.zeros(len(x), dtype=torch.int64)
            return ((x * self.complex).abs() + self.table(index)).square().sum()

    assert run(world, Unusual(), lambda model, batch: model(batch[0]))[0]
    assert run(world, Network(), lambda model, batch: loss(model, batch).detach())[0]
    tiny = nn.Linear(6, 1, bias=False)
    assert run(world, tiny, lambda m, batch: m(batch[0]).square().mean(), length=2)[0]
