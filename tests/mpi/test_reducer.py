"""GradientReducer: the gradient of the global batch, for a module that nothing wraps."""

import copy
import gc
import math
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from uneven import SHARES, by_reducer, check_like_one_process, network, sgd

from kaitian_mpi.distributed import reducer as reducer_module
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.errors import UnsupportedError, UserError
from kaitian_mpi.mpi.exchange import gather_values

pytestmark = pytest.mark.sizes(1, 3)

SMALL = (2000, 4000)  # bytes, so that small networks have several buckets


@pytest.fixture
def sent(monkeypatch):
    """The lengths of the buckets that are summed."""
    lengths = []
    original = reducer_module.sum_gradients

    def record(buffer, *args, **kwargs):
        lengths.append(buffer.numel())
        return original(buffer, *args, **kwargs)

    monkeypatch.setattr(reducer_module, "sum_gradients", record)
    return lengths


@pytest.fixture
def reducer_of(world):
    """Make a reducer that is closed at the end."""
    made = []

    def make(model, **options):
        made.append(GradientReducer(model, **{"bucket_caps": SMALL, **options}))
        return made[-1]

    yield make
    for reducer in made:
        reducer.close()


class Branches(nn.Module):
    """Layers of which a forward takes those it is told to."""

    def __init__(self, layers=4, width=20):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).double()

    def through(self, names, value):
        for name in names:
            value = self.layers[name](value).tanh()
        return value


def summed(reducer, loss, weight=1.0):
    reducer.arm(weight)
    loss.backward()
    reducer.finish()


def assert_alike(world, model):
    """Check that gradients and their strides are the same, bit by bit, on all ranks."""
    gradients = [parameter.grad for parameter in model.parameters()]
    described = [grad if grad is None else (grad.stride(), grad.tolist()) for grad in gradients]
    assert len(set(gather_values(world.comm, str(described)))) == 1


def assert_equal_gradients(model, expected, tolerance=1e-12):
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    for (name, parameter), expected_parameter in pairs:
        if expected_parameter.grad is None:
            assert parameter.grad is None, name
        else:
            difference = parameter.grad - expected_parameter.grad
            assert difference.abs().max().item() <= tolerance, name


def check(world, reducer, model, loss_of, *, times=2, tolerance=1e-12):
    """Check that the gradients are those of one process that computes the same."""
    alone = copy.deepcopy(model)
    for _ in range(times):
        model.zero_grad()
        alone.zero_grad()
        summed(reducer, loss_of(model), 1 / world.size)
        loss_of(alone).backward()
        assert_equal_gradients(model, alone, tolerance)
        assert_alike(world, model)


# The sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_is_summed_along_with_the_gradients(world, reducer_of, sent, dtype):
    weights = SHARES[: world.size]
    model = nn.Linear(4, 4).to(dtype)
    reducer = reducer_of(model)
    assert reducer.carries_number
    for step in range(3):
        # What a rank with a weight of 0 has computed does not count.
        number = torch.tensor(world.rank + step if weights[world.rank] else float("nan"))
        reducer.arm(weights[world.rank], number.bfloat16())
        model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        reducer.finish()
        expected = sum(weight * (rank + step) for rank, weight in enumerate(weights))
        assert reducer.number.item() == expected
        assert reducer.is_finite()
    assert len(sent) == 3  # one bucket per step
    few_bits = nn.Linear(4, 4).bfloat16()
    assert not reducer_of(few_bits).carries_number
    assert reducer_of(nn.Sequential(few_bits, nn.Linear(4, 4))).carries_number


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("make", "micro_batches"),
    [
        (sgd, 3),
        pytest.param(adamw, 1, marks=pytest.mark.thorough),
        pytest.param(sgd, 1, marks=pytest.mark.thorough),
        pytest.param(adamw, 3, marks=pytest.mark.thorough),
    ],
)
def test_uneven_ranks_train_like_one_process(world, make, micro_batches):
    check_like_one_process(world, by_reducer, steps=8, micro_batches=(micro_batches,), make=make)


def test_gradients_are_views_of_buckets_alike_on_all_ranks(world, reducer_of, sent):
    model = network()
    reducer = reducer_of(model)
    for _ in range(3):
        model.zero_grad()
        sent.clear()
        images = torch.randn(world.rank + 1, 3, 8, 8)
        summed(reducer, model(images).square().mean(), 0.3)
        assert_alike(world, model)
    parameters = list(model.parameters())
    assert len(sent) > 1
    # Beside the gradients, a number for each parameter is sent, and one with each bucket.
    numbers = len(parameters) + len(sent)
    assert sum(sent) == sum(p.numel() for p in parameters) + numbers
    memories = {p.grad.untyped_storage().data_ptr() for p in parameters}
    assert len(memories) == len(sent)


TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def test_buckets_are_full_at_the_caps_and_hold_one_type_each(reducer_of, sent):
    layers = [nn.Linear(10, 10, bias=False, dtype=dtype) for dtype in TYPES for _ in range(4)]
    reducer = reducer_of(nn.ModuleList(layers), bucket_caps=(800, 1700))
    reducer.arm(1)
    reducer.finish()
    # Of each type, from the last on, a bucket of 800 bytes or more, then of 1700 or more.
    assert sent == [202, 604, 405, 102, 304, 203, 203]


def test_parameters_of_several_types(world, reducer_of):
    shapes = [(dtype, 5 + length) for dtype in TYPES for length in (0, 20_000)]
    model = nn.ParameterList(torch.ones(length, dtype=dtype) for dtype, length in shapes)
    reducer = reducer_of(model)
    factor = 2j if world.rank else 2.0
    loss = sum((p * (factor if p.is_complex() else 2.0)).abs().sum() for p in model)
    summed(reducer, loss, 0.5)
    for parameter in model:
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, torch.full_like(parameter, world.size))
    assert reducer.is_finite()


def test_channels_last_gradients_keep_their_strides(world, reducer_of):
    torch.manual_seed(1)
    layers = [nn.Conv2d(8, 16, 3), nn.Conv2d(16, 160, 1), nn.Conv2d(160, 16, 3)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last).double()
    images = torch.randn(2, 8, 6, 6).double().to(memory_format=torch.channels_last)
    reducer = reducer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(world, reducer, model, lambda m: m(images).square().sum(), tolerance=1e-9)
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


# Parameters that are not used


def check_branches(world, reducer, model, names_of_ranks):
    """Check the sum over ranks that each use the layers with these names, in this order."""
    alone = copy.deepcopy(model)
    value = torch.ones(2, 20).double()
    model.zero_grad()
    alone.zero_grad()
    summed(reducer, model.through(names_of_ranks[world.rank], value).sum())
    for names in names_of_ranks:
        alone.through(names, value).sum().backward()
    assert_equal_gradients(model, alone)
    assert_alike(world, model)


def test_ranks_use_unlike_parameters_in_unlike_orders(world, reducer_of):
    """Only a parameter that no rank has used has no gradient."""
    model = Branches()
    reducer = reducer_of(model)
    uses = [([0, 3], [0, 3, 1]), ([3, 1, 2], [2]), ([0], [0]), ([0, 1, 2, 3], [3, 2, 1, 0])]
    for names, names_of_last in uses * 2:
        check_branches(world, reducer, model, [names] * (world.size - 1) + [names_of_last])


@pytest.mark.parametrize("nothing", [None, 0.0])
def test_a_weight_of_zero_is_a_gradient_of_zero_and_none_is_none(world, last, reducer_of, nothing):
    model = Branches()
    reducer = reducer_of(model)
    names = [0, 1] if world.rank == last else [0, 2]
    weight = nothing if world.rank == last else 1.0
    summed(reducer, model.through(names, torch.ones(1, 20).double()).sum(), weight)
    gradient_of_last = model.layers[1].weight.grad
    gradient_of_others = model.layers[2].weight.grad
    if nothing is None:
        assert gradient_of_last is None
    else:
        assert not gradient_of_last.any()
    assert (gradient_of_others is None) == (world.size == 1)
    assert_alike(world, model)


def test_a_loss_that_reaches_no_parameter_and_a_rank_without_a_backward(world, last, reducer_of):
    model = Branches()
    reducer = reducer_of(model)
    summed(reducer, torch.ones(1, requires_grad=True).sum())
    assert all(p.grad is None for p in model.parameters())
    assert reducer.is_finite()
    reducer.arm(float(world.rank != last))
    if world.rank != last:
        model.through([0], torch.ones(1, 20).double()).sum().backward()
    reducer.finish()
    assert (model.layers[0].weight.grad is None) == (world.size == 1)
    assert model.layers[1].weight.grad is None
    assert_alike(world, model)


# Buckets and backward


def test_buckets_are_sent_in_order_while_backward_computes(world, reducer_of):
    model = Branches()
    events = []
    reducer = reducer_of(model, on_bucket=events.append)
    for _ in range(2):
        model.zero_grad()
        events.clear()
        value = torch.ones(2, 20, requires_grad=True, dtype=torch.float64)
        value.register_hook(lambda _: events.append("end of backward"))
        summed(reducer, model.through([0, 1, 2, 3], value).sum())
        assert len(events) > 3
        # The bucket of the first layer may follow.
        assert events.index("end of backward") >= len(events) - 2
        events.remove("end of backward")
        assert events == [False] * (len(events) - 1) + [True]  # whether it is the last bucket


@pytest.mark.parametrize(("caps", "threads"), [(None, 0), (SMALL, 1)])
def test_one_bucket_is_summed_by_the_caller(world, reducer_of, caps, threads):
    threads_before = threading.active_count()
    group = dist.new_group()
    events = []
    model = network()
    reducer = reducer_of(model, group=group, bucket_caps=caps, on_bucket=events.append)
    for _ in range(2):
        reducer.arm(1.0)
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        assert events[-1:] == [True]  # all gradients are ready
        events.clear()
        with pytest.raises(
            UnsupportedError, match="received a gradient after its bucket was reduced"
        ):
            model(torch.ones(2, 3, 8, 8)).sum().backward()
        model.zero_grad()
        summed(reducer, model(torch.ones(2, 3, 8, 8)).sum())
        events.clear()
    assert threading.active_count() - threads_before == threads
    dist.destroy_process_group(group)


def test_a_weight_may_wait_for_the_sum_of_the_ranks_weights(world, reducer_of):
    model = nn.Linear(3, 1, bias=False).double()
    calls = []
    reducer = reducer_of(model, on_bucket=lambda _: calls.append("bucket"))
    for _ in range(2):
        model.zero_grad()
        calls.clear()
        total = torch.tensor(float(world.rank + 1))
        work = dist.all_reduce(total, async_op=True)

        def weight(work=work, total=total):
            work.wait()
            calls.append("weight")
            return (world.rank + 1) / total.item()

        summed(reducer, model(torch.ones(1, 3).double()).sum(), weight)
        assert calls == ["bucket", "weight"]
        assert (model.weight.grad - 1).abs().max() <= 1e-15


def several_forwards(model):
    first = model.through([0, 1], torch.ones(1, 20).double())
    second = model.through([1, 2], torch.ones(3, 20).double())
    return first.sum() * second.mean() + model.layers[3].bias.square().sum()


def checkpoints(model, names=([0, 1], [2, 3]), use_reentrant=False):
    value = torch.ones(2, 20, requires_grad=True, dtype=torch.float64)
    for part in names:
        value = checkpoint(model.through, part, value, use_reentrant=use_reentrant)
    return value.sum()


@pytest.mark.parametrize(
    "loss_of",
    [several_forwards, checkpoints, partial(checkpoints, use_reentrant=True)],
    ids=["several forwards", "checkpoints", "reentrant checkpoints"],
)
def test_a_loss_may_call_any_method_several_times(world, reducer_of, loss_of):
    model = Branches()
    check(world, reducer_of(model), model, loss_of)


def test_a_layer_that_reentrant_checkpointing_repeats(world, reducer_of):
    """Its gradient becomes ready twice in one backward."""
    model = Branches(2)
    repeated = partial(checkpoints, names=([0], [1], [0]))
    # In one bucket: the other layer comes between, so the bucket is sent after both.
    in_one_bucket = reducer_of(model, bucket_caps=(1 << 20, 1 << 20))
    check(world, in_one_bucket, model, repeated)
    in_one_bucket.close()
    reducer = reducer_of(model, bucket_caps=(1, 1))
    reducer.arm(1.0)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.\w+ received .*use_reentrant=False"):
        repeated(model, use_reentrant=True).backward()
    check(world, reducer, model, repeated)


# Gradients that are not finite


@pytest.mark.parametrize(
    ("number_of_last", "others", "is_finite"),
    [
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (-math.inf, 1.0, False),
        (1.0, 1.0, True),
        (1e38, 1e38, True),  # the sum of the gradients overflows
    ],
)
def test_all_ranks_know_whether_gradients_are_finite(
    world, last, reducer_of, number_of_last, others, is_finite
):
    model = nn.Linear(300, 20)
    reducer = reducer_of(model)
    value = torch.full((1, 300), others)
    if world.rank == last:
        value[0, 17] = number_of_last
    summed(reducer, model(value).sum(), 1 / world.size)
    assert reducer.is_finite() is is_finite


# Mistakes, and what comes after


def test_models_that_cannot_be_trained_are_refused(reducer_of):
    for width in (2, 200):
        model = nn.Embedding(300, width, sparse=True)
        reducer_of(model).arm(1.0)
        with pytest.raises(UserError, match=r"sparse_coo.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="2 parameters, none of which"):
        GradientReducer(model)
    model.weight.requires_grad_(True)
    reducer = reducer_of(model)
    model.bias.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="bias requires gradients now"):
        reducer.arm(1.0)


def test_calls_out_of_order(world, reducer_of):
    model = network()
    reducer = reducer_of(model)
    images = torch.ones(2, 3, 8, 8)
    with pytest.raises(RuntimeError, match="without arm"):
        reducer.finish()
    reducer.arm(5.0)
    reducer.arm(1 / world.size)  # no backward has come between
    model(images).sum().backward()
    with pytest.raises(RuntimeError, match="before the finish"):
        reducer.arm(1.0)
    with pytest.raises(UnsupportedError, match=r"second backward"):
        model(images).sum().backward()
    model.zero_grad()
    summed(reducer, model(images).sum(), 1 / world.size)
    reducer.arm(7.0)
    for _ in range(2):
        reducer.close()
        with pytest.raises(RuntimeError, match="after close"):
            reducer.arm(1.0)
    # Gradients are left to autograd.
    alone = copy.deepcopy(model)
    for network_or_copy in (model, alone):
        network_or_copy.zero_grad()
        network_or_copy(images).sum().backward()
    assert_equal_gradients(model, alone)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def through_all(model):
    return model.through([0, 1, 2, 3], torch.ones(2, 20).double()).sum()


def test_a_backward_that_raises_leaves_nothing_behind(world, reducer_of):
    model = Branches()
    alone = Branches()
    reducer = reducer_of(model)
    through_all(alone).backward()

    def fail(_):
        raise ValueError("planted")

    for with_reset in (False, True, False):
        hidden = model.through([0, 1], torch.ones(2, 20).double())
        hidden.register_hook(fail)
        reducer.arm(1.0)
        with pytest.raises(ValueError, match="planted"):
            model.through([2, 3], hidden).sum().backward()
        model.zero_grad()
        if with_reset:  # otherwise the gradients of this micro-batch would be sent
            reducer.reset()
            through_all(model).backward()
            assert_equal_gradients(model, alone)
        check(world, reducer, model, through_all, times=1)
        model.zero_grad()


def test_nothing_keeps_a_model_alive(world):
    gc.collect()
    gc.disable()
    try:
        model = Branches()
        reducer = GradientReducer(model)
        summed(reducer, model.through([0], torch.ones(1, 20).double()).sum())
        seen = [weakref.ref(model), weakref.ref(reducer), weakref.ref(model.layers[0].weight)]
        del model, reducer
        assert [ref() for ref in seen] == [None, None, None]
    finally:
        gc.enable()


def test_ranks_with_other_parameters_describe_themselves_differently():
    models = [network() for _ in range(6)]
    models[2][0].bias.requires_grad_(False)
    models[3].double()
    models[4].to(memory_format=torch.channels_last)
    models[5].append(nn.Linear(5, 5))
    first, same, *others = [GradientReducer(model).describe() for model in models]
    assert first == same
    assert len({first, *others}) == 5
