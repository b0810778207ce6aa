"""Adaptive batches in a script's own loop: exact for any plan, and refused if they cannot be."""

import contextlib
import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations import losses
from kaitian_mpi.integrations.adaptive import install
from kaitian_mpi.integrations.planned_batches import PlannedBatchSampler
from kaitian_mpi.integrations.shard.budget import LayoutSettings
from kaitian_mpi.integrations.shard.install import Installed

pytestmark = pytest.mark.sizes(3)

ROWS = 37  # 1 more than a multiple of the ranks' batches of 3
IGNORED = -100


@pytest.fixture
def adaptive(world):
    adaptive = install(world)
    yield adaptive
    adaptive.close()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


class Language(nn.Module):
    """Returns its own loss: the mean over the labels that are not ignored, or their sum."""

    def __init__(self, items=None):
        super().__init__()
        self.layer, self._items = network(), items

    def forward(self, inputs, labels):
        reduction = "sum" if self._items else "mean"
        scores = self.layer(inputs)
        loss = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss / (self._items or 1), "scores": scores}


def data():
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (ROWS, 4), generator=generator)
    labels[torch.rand(ROWS, 4, generator=generator) < 0.4] = IGNORED
    labels[:, 0] = 1
    return TensorDataset(inputs, labels, torch.arange(ROWS))


def positional(model, x, y):
    return model(x, y)["loss"]


def two_views(model, x, y):
    views = (x[:, 0], -x[:, 0])
    return sum(cross_entropy(model(view), y[:, 0]) for view in views)


def loss_beside(model, x, y):
    """As of distillation: the model returns a loss as well, which is not trained on."""
    return cross_entropy(model(inputs=x, labels=y)["scores"][:, 0], y[:, 0])


def two_losses(model, x, y):
    output = model(inputs=x, labels=y)
    return output["loss"] + output["scores"].square().mean()


class LightningModule(nn.Module):
    """Is taken for one of Lightning: its forward has effects."""

    automatic_optimization = True

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x, y):
        self.calls += 1
        return self.model(inputs=x, labels=y)["loss"]


class OwnLoss(LightningModule):
    """Computes its loss itself, which cannot be compared."""

    def __init__(self, reduction):
        super().__init__(network())
        self._reduction = reduction

    def forward(self, x, y):
        self.calls += 1
        return cross_entropy(self.model(x[:, 0]), y[:, 0], reduction=self._reduction)


class Pairs(LightningModule):
    """Has a loss between rows."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4))

    def forward(self, x):
        scores = self.model(x)
        return {"loss": cross_entropy(scores @ scores.T, torch.arange(len(x)))}


class OnItself(nn.Module):
    """Calls a model on its own output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(self.model(x))


def layer(inputs, outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(inplace=True)).double()


def two_models():
    return nn.Sequential(layer(5, 4), layer(4, 3))


def wrap_both(models):
    return nn.Sequential(*map(DistributedDataParallel, models))


def wrap_inner(outer):
    return OnItself(DistributedDataParallel(outer.model))


def in_eval_mode(model):
    return DistributedDataParallel(model).eval()


def mean(model, x, y):
    return cross_entropy(model(x[:, 0]), y[:, 0])


def labeled(model, x, y):
    return model(inputs=x, labels=y)["loss"]


CASES = {
    "mean": (network, mean, DistributedDataParallel),
    "two views": (network, two_views, DistributedDataParallel),
    "labels": (Language, labeled, DistributedDataParallel),
    "positional": (Language, positional, DistributedDataParallel),
    "sum": (lambda: Language(items=7.0), labeled, DistributedDataParallel),
    "beside": (Language, loss_beside, DistributedDataParallel),
    "two losses": (Language, two_losses, DistributedDataParallel),
    "two models": (two_models, mean, wrap_both),
    "own output": (lambda: OnItself(layer(5, 5)), mean, wrap_inner),
    "eval mode": (Language, labeled, in_eval_mode),
    "inner model": (
        lambda: LightningModule(Language()),
        lambda model, x, y: model(x, y),
        DistributedDataParallel,
    ),
    "own mean": (lambda: OwnLoss("mean"), lambda model, x, y: model(x, y), DistributedDataParallel),
    "own sum": (lambda: OwnLoss("sum"), lambda model, x, y: model(x, y), DistributedDataParallel),
}
FURTHER_CASES = {"positional", "inner model"}  # as "labels", in another form


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", by_default(CASES, CASES.keys() - FURTHER_CASES))
def test_any_plan_gives_the_weights_of_one_process(adaptive, monkeypatch, case, accumulated):
    build, loss_of, wrap = CASES[case]
    size = adaptive.size
    plans = ([2 + step % 3, *[3] * (size - 2), 4 - step % 3] for step in range(99))

    def new_plan():
        adaptive._plans._plans[3].shares = next(plans)
        return True

    monkeypatch.setattr(adaptive, "has_new_plan", new_plan)
    rows = data()
    sampler = DistributedSampler(rows, seed=3)
    loader = DataLoader(rows, batch_size=3, sampler=sampler)
    module, alone = build(), build()
    model = wrap(module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (module, alone)]
    world_sum = size if "sum" in case else 1
    seen, steps = [], 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            steps += 1
            is_last = steps % accumulated == 0
            for part in model.modules():
                if isinstance(part, DistributedDataParallel):
                    part.require_backward_grad_sync = is_last
            loss_of(model, *batch[:2]).backward()
            ids_by_rank = [None] * size
            dist.all_gather_object(ids_by_rank, batch[2].tolist())
            # In the last step there are fewer rows than ranks: some have a row that counts nothing.
            whole = list(dict.fromkeys(row for part in ids_by_rank for row in part))
            seen[-1] += whole
            # DDP averages over the ranks what one process would add up.
            (loss_of(alone, *rows[whole][:2]) / world_sum).backward()
            if is_last:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert getattr(module, "calls", steps) == steps
    for a, b in zip(module.parameters(), alone.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-13
    assert [sorted(rows) for rows in seen] == [list(range(ROWS))] * 2


@pytest.mark.parametrize("skipped", by_default([0, 1, 3], [1, 3]))
def test_a_new_loader_in_each_epoch_and_a_resume_after_any_batch(adaptive, skipped):
    """With a batch norm over the rows of all ranks, and a last batch that not all ranks have."""

    def build():
        torch.manual_seed(1)
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    rows = TensorDataset(*data()[: 3 * 9 + 2])
    module, alone = nn.SyncBatchNorm.convert_sync_batchnorm(build()), build()
    model = DistributedDataParallel(module)
    for epoch in range(2):
        sampler = DistributedSampler(rows, seed=epoch)
        for number, (x, y, ids) in enumerate(DataLoader(rows, 3, sampler=sampler)):
            if number < skipped and not epoch:
                continue
            ids_by_rank = [None] * adaptive.size
            dist.all_gather_object(ids_by_rank, ids.tolist())
            whole = list(dict.fromkeys(row for part in ids_by_rank for row in part))
            for trained, (inputs, labels) in ((model, (x, y)), (alone, rows[whole][:2])):
                trained.zero_grad()
                cross_entropy(trained(inputs[:, 0]), labels[:, 0]).backward()
            for a, b in zip(module.parameters(), alone.parameters(), strict=True):
                assert float((a.grad - b.grad).abs().max()) < 1e-13


@dataclasses.dataclass
class Output:
    """What a model may return; pytree does not know it."""

    scores: torch.Tensor


class Returns(nn.Module):
    """Returns what a function makes of its scores."""

    def __init__(self, make):
        super().__init__()
        self.layer, self._make = nn.Linear(4, 4), make

    def forward(self, x):
        return self._make(self.layer(x))


def train(model, rank, loss_of, sampler=DistributedSampler, more_rows=0, load=None):
    rows = TensorDataset(torch.randn(64, 4))
    loader = (
        load(rows)
        if load
        else DataLoader(rows, 6 + more_rows * rank, sampler=sampler(rows) if sampler else None)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        loss_of(model(x)).backward()
        optimizer.step()


def wrapped(make=lambda scores: scores):
    return DistributedDataParallel(Returns(make))


def square(scores):
    return scores.square().mean()


class RepeatSampler(SequentialSampler):
    """Named like that of TRL's trainers that generate."""


def shard(sampler):
    """Return a loader as Accelerate prepares it."""
    from accelerate.data_loader import BatchSamplerShard

    batches = BatchSampler(sampler, 2, drop_last=False)
    batches_of_rank = BatchSamplerShard(batches, dist.get_world_size(), dist.get_rank())
    return DataLoader(sampler.data_source, batch_sampler=batches_of_rank)


class Stream(IterableDataset):
    """Yields rows."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Buckets:
    """A batch sampler of a script, with batches of given rows."""

    def __init__(self, *batches, **attributes):
        self.batches = batches
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def bucketed(rows, *batches, **attributes):
    """Return a loader of such batches as Accelerate prepares it."""
    from accelerate.data_loader import BatchSamplerShard

    batch_sampler = Buckets(*batches, **attributes)
    batches_of_rank = BatchSamplerShard(batch_sampler, dist.get_world_size(), dist.get_rank())
    return DataLoader(rows, batch_sampler=batches_of_rank)


def split_stream(rows):
    from accelerate.data_loader import IterableDatasetShard

    place = {"num_processes": dist.get_world_size(), "process_index": dist.get_rank()}
    return DataLoader(IterableDatasetShard(Stream(rows), 3, split_batches=True, **place), 1)


NEEDS = "needs a DataLoader with torch's DistributedSampler"
REFUSED = {
    "no sampler": (wrapped, {"sampler": None}, NEEDS),
    "no DDP": (lambda: nn.Linear(4, 4), {}, NEEDS),
    "split stream": (wrapped, {"load": split_stream}, "leave out Accelerate's split_batches"),
    "batches of its own": (
        wrapped,
        {"load": lambda rows: DataLoader(Stream(rows), batch_size=None)},
        "IterableDataset: give the DataLoader a batch_size",
    ),
    "equal shapes": (
        wrapped,
        {"load": lambda rows: shard(RepeatSampler(rows))},
        "gathers equal batches from the ranks",
    ),
    "different buckets": (
        wrapped,
        {
            "load": lambda rows: bucketed(
                rows, *([[0, 1]] * 3), *([[1], [dist.get_rank()], [3]] * 2)
            )
        },
        "different batches; seed them alike",
    ),
    "smaller batches": (
        wrapped,
        {"load": lambda rows: bucketed(rows, *([[0, 1], [2, 3], [4]] * 3), batch_size=2)},
        "leaves out batches of other sizes than the batch_size of Buckets",
    ),
    "sharded": (lambda: fully_shard(nn.Linear(4, 4)), {}, "does not work with FSDP"),
    "different batches": (wrapped, {"more_rows": 1}, r"which are \[6, 7"),
    "pairs": (
        lambda: wrapped(lambda scores: {"loss": (scores @ scores.T).square().sum()}),
        {"loss_of": lambda output: output["loss"]},
        "neither a mean nor a sum over rows",
    ),
    "own pairs": (
        lambda: DistributedDataParallel(Pairs()),
        {"loss_of": lambda output: output["loss"]},
        "the loss that the training_step returns is neither a mean nor a sum over rows",
    ),
    "no tensor": (
        lambda: wrapped(Output),
        {"loss_of": lambda output: square(output.scores)},
        r"no tensor with a gradient in what the model returns \(Output\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused_on_every_rank(adaptive, case):
    build, options, message = REFUSED[case]
    with pytest.raises(AgreedError, match=message):
        train(build(), adaptive.rank, **{"loss_of": square, **options})


def test_what_cannot_be_adapted_is_refused_in_layout_shard(world, adaptive):
    shards = Installed(world, LayoutSettings(), adaptive.waiting)
    try:
        test_what_cannot_be_adapted_is_refused_on_every_rank(adaptive, "own pairs")
    finally:
        shards.close()


@pytest.mark.parametrize("drop_last", [True, False])
def test_parts_of_a_stream_that_end_at_different_steps(adaptive, capsys, drop_last):
    """Rank r has 4 + 2 r rows, of which it takes 2 in a step."""
    part = torch.arange(10.0 * adaptive.rank, 10.0 * adaptive.rank + 4 + 2 * adaptive.rank)
    loader = DataLoader(Stream(part.view(-1, 1)), 2, drop_last=drop_last)
    layer = nn.Linear(1, 1, bias=False)
    model, steps = DistributedDataParallel(layer), []
    for x in loader:
        layer.zero_grad()
        model(x).mean().backward()
        steps.append(layer.weight.grad.item())
    means = [(0 + 1 + 10 + 11 + 20 + 21) / 6, (2 + 3 + 12 + 13 + 22 + 23) / 6]
    means += [] if drop_last else [(14 + 15 + 24 + 25) / 4, (26 + 27) / 2]
    assert steps == pytest.approx(means)
    lines = [line for line in capsys.readouterr().out.splitlines() if "stream" in line]
    text = "rank 0 has no full batch" if drop_last else "rank 0 has no row"
    assert [text in line for line in lines] == [True] * (adaptive.rank == 0)


def test_a_part_of_a_stream_that_ends_before_training_begins_is_named(adaptive):
    """As the next batch is taken before the first one is trained on, which trainers do."""
    part = torch.ones(4 if adaptive.rank else 2, 4)
    batches = list(DataLoader(Stream(part), 2))
    message = "batch 1 of iteration 1 over its part of a stream on rank 0, batch 2"
    with pytest.raises(UserError, match=message):
        wrapped()(batches[0])


@pytest.mark.parametrize("mixed", [False, True])
def test_batches_of_a_scripts_own_batch_sampler(adaptive, capsys, monkeypatch, mixed):
    """Batches of 3, 1 and 2 rows in each step; rank 2 is the fastest."""

    def new_plan():
        adaptive._plans._plans[2].shares = [1, 2, 3]
        return True

    monkeypatch.setattr(adaptive, "has_new_plan", new_plan)
    rows = torch.arange(18.0).view(-1, 1)
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9], [10, 11], [12, 13, 14], [15], [16, 17]]
    layer, taken = nn.Linear(1, 1, bias=False), []
    model = DistributedDataParallel(layer)
    for step, x in enumerate(bucketed(rows, *batches, rows_may_be_mixed=mixed)):
        layer.zero_grad()
        model(x).mean().backward()
        assert layer.weight.grad.item() == pytest.approx(6 * step + 2.5)
        taken.append(x.flatten().tolist())
    divided = [[6], [7, 8], [9, 10, 11]] if mixed else [[9], [10, 11], [6, 7, 8]]
    assert taken[:2] == [batches[adaptive.rank], divided[adaptive.rank]]
    text = (
        "a step's batches of Buckets are divided by the plan" if mixed else "of Buckets stay whole"
    )
    assert capsys.readouterr().out.count(text) == (adaptive.rank == 0)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_that_one_rank_leaves_out_is_named(adaptive, accumulated):
    """As after an out-of-memory error that the script catches; else the others would wait."""
    model, rows = wrapped(), TensorDataset(torch.randn(45, 4))
    out_of_memory = model.module.register_forward_pre_hook(fail_on_batch_3(adaptive.rank == 1))
    part = "4 batches up to batch 4 of an epoch on ranks 0, 2, 3 batches up to batch 4"
    if accumulated == 1:
        part = "3 batches up to batch 3 of an epoch on ranks 0, 2, 3 batches up to batch 4"
    step = "in step 3, rank 1 left out a batch that the others have trained on"
    step = step if accumulated == 1 else step.replace("3", "2")
    with pytest.raises(AgreedError, match=f"{step}: {part} of an epoch on rank 1"):
        leave_out_failures(
            model, DataLoader(rows, 3, sampler=DistributedSampler(rows)), accumulated
        )
    out_of_memory.remove()


def fail_on_batch_3(fails):
    forwards = itertools.count(1)

    def hook(*_):
        if next(forwards) == 3 and fails:
            raise MemoryError

    return hook


def leave_out_failures(model, loader, accumulated):
    for index, (x,) in enumerate(loader):
        model.require_backward_grad_sync = (index + 1) % accumulated == 0
        with contextlib.suppress(MemoryError):
            square(model(x)).backward()


def test_ranks_that_read_different_streams_are_told_so(adaptive):
    from accelerate.data_loader import IterableDatasetShard

    rows = [(row,) for row in torch.ones(9 if adaptive.rank else 10, 4)]
    stream = IterableDatasetShard(Stream(rows), 2, False, adaptive.size, adaptive.rank)
    with pytest.raises(AgreedError, match="different numbers of rows"):
        train(wrapped(), adaptive.rank, square, load=lambda _: DataLoader(stream, 2))


@pytest.mark.parametrize("fails", [True, False])
def test_a_forward_of_lightning_without_a_loss_is_not_watched_any_longer(adaptive, fails):
    class WithoutLoss(LightningModule):
        def forward(self, x):
            if fails:
                raise ValueError("no such word")
            return torch.tensor(1.0)

    module = WithoutLoss(nn.Linear(4, 4))
    model = DistributedDataParallel(module)
    module.requires_grad_(False)
    rows = TensorDataset(torch.randn(64, 4))
    (x,) = next(iter(DataLoader(rows, 4, sampler=DistributedSampler(rows))))
    with pytest.raises(ValueError, match="word") if fails else contextlib.nullcontext():
        model(x)
    assert not nn.modules.module._global_forward_hooks


def uncut_after_a_validation(adaptive):
    rows = TensorDataset(torch.randn(24, 4))
    model = wrapped().eval()
    for (x,) in DataLoader(rows, 2, sampler=DistributedSampler(rows)):
        with torch.no_grad():
            model(x)
    model.train()
    for (x,) in DataLoader(rows, 2):  # with a sampler of its own, in a real script
        square(model(x)).backward()


def two_loaders(adaptive):
    rows = TensorDataset(torch.randn(24, 4))
    loaders = [DataLoader(rows, 2, sampler=DistributedSampler(rows)) for _ in range(2)]
    model = wrapped()
    for (x,), (y,) in zip(*loaders, strict=True):
        (square(model(x)) + square(model(y))).backward()


def other_rows(adaptive):
    rows = TensorDataset(torch.randn(64, 4))
    model = wrapped()
    for index, (x,) in enumerate(DataLoader(rows, 4, sampler=DistributedSampler(rows))):
        square(model(x[: 4 - index])).backward()


def hidden_input(adaptive):
    rows = TensorDataset(torch.randn(64, 4))
    first, second = wrapped(), wrapped()
    second.module.forward = lambda output: second.module.layer(output.scores)
    for (x,) in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
        square(second(Output(first(x)))).backward()


def hidden_output_in_eval_mode(adaptive):
    rows = TensorDataset(torch.randn(64, 4))
    model = wrapped(Output).eval()
    for (x,) in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
        scores = model(x).scores
        square(scores).backward()


def second_gradients(adaptive):
    rows = TensorDataset(torch.randn(64, 4))
    model = wrapped()
    for (x,) in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
        torch.autograd.grad(square(model(x.requires_grad_())), x, create_graph=True)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (uncut_after_a_validation, "cannot divide this script.s batches"),
        (two_loaders, "this step has batches of two"),
        (other_rows, "has given this rank a batch of 4 rows, but the model was trained on 3"),
        (second_gradients, "gradients of gradients"),
        (hidden_output_in_eval_mode, "no tensor with a gradient in what the model returns"),
        (hidden_input, "input was computed by another model, and is not seen"),
    ],
)
def test_gradients_that_would_be_wrong_are_refused(adaptive, loop, message):
    with pytest.raises(UserError, match=message):
        loop(adaptive)


def test_models_with_unlike_rows_share_a_batch(adaptive):
    rows = TensorDataset(torch.randn(64, 4))
    generator, judge = wrapped(), wrapped()
    for (x,) in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
        made = generator(x)
        square(judge(torch.cat([x, made.detach()]))).backward()
        square(judge(made)).backward()
    assert adaptive.forwards._ratios[judge] == 2 * adaptive.forwards._ratios[generator]


def test_the_rows_that_accelerate_gathers_may_be_unequal(adaptive, monkeypatch):
    operations = pytest.importorskip("accelerate.utils.operations")
    state = SimpleNamespace(
        num_processes=adaptive.size, backend="gloo", device=torch.device("cpu"), debug=False
    )
    monkeypatch.setattr(operations, "PartialState", lambda: state)
    shard(SequentialSampler(range(12)))
    rank_rows = torch.arange(4.0)[: adaptive.rank + 1] + 10 * adaptive.rank
    gathered = operations._gpu_gather(
        {"rows": rank_rows, "each": rank_rows[0], "alike": rank_rows[None, :1]}
    )
    assert gathered["rows"].tolist() == [0, 10, 11, 20, 21, 22]
    assert gathered["each"].tolist() == [0, 10, 20]
    assert gathered["alike"].tolist() == [[0], [10], [20]]
    adaptive.close()
    assert operations._gpu_gather(rank_rows[:1]).tolist() == [0, 10, 20]


def test_a_watched_model_can_be_copied(adaptive):
    model = wrapped()
    copied = copy.deepcopy(model)
    assert torch.equal(copied.module.layer.weight, model.module.layer.weight)


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (lambda values, labels: values.mean(), losses.MEAN),
        (lambda values, labels: values.sum(), losses.SUM),
        (lambda values, labels: values[labels >= 0].mean(), losses.TOKENS),
        (lambda values, labels: values[:, 1:][labels[:, 1:] >= 0].mean(), losses.SHIFTED_TOKENS),
        (lambda values, labels: values.sum().square(), losses.UNKNOWN),
        (lambda values, labels: values[labels != 2].mean(), "the mean over labels but 2"),
    ],
)
@pytest.mark.parametrize("name", ["labels", "argument 2"])
@pytest.mark.parametrize("rows", [range(8), [7], [7, 15]], ids=["eight", "one", "alike"])
def test_the_rule_of_a_loss_is_found_without_a_trace(loss, rule, name, rows):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 5), nn.Dropout())

        def forward(self, x, labels):
            return loss(self.layers(x).square().mean(-1), labels), x

    torch.manual_seed(0)
    model, (inputs, labels, _) = Model(), data()[list(rows)]
    kwargs = {"x": inputs.float(), "labels": labels}
    args = tuple(kwargs.values()) if name != "labels" else ()
    kwargs = {} if args else kwargs
    state = copy.deepcopy(torch.get_rng_state())
    rules = losses.find_rules(model, args, kwargs)
    text = getattr(rule, "text", rule).replace("labels", name)
    texts = [rule_found.text.removesuffix(" but -100") for rule_found in rules]
    assert text in (texts if text.endswith("but 2") and len(rows) < 8 else texts[:1])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


class ByRow(nn.Module):
    """Returns a loss of labels that are all counted: by row, or by label."""

    def __init__(self, by_label):
        super().__init__()
        self.layer, self._by_label = nn.Embedding(7, 7).double(), by_label

    def forward(self, x, labels):
        losses = cross_entropy(self.layer(x).mT, labels, reduction="none")
        counted = labels.ne(IGNORED)
        if self._by_label:
            return losses.sum() / counted.sum()
        return (losses.sum(1) / counted.sum(1)).mean()


@pytest.mark.parametrize("by_label", [True, False])
def test_a_rule_stays_unknown_until_a_batch_tells_it(adaptive, capsys, by_label):
    """Rows of as many labels each at first, one a rank in the first batch that is trained on."""
    torch.manual_seed(0)
    words = torch.randint(7, (16, 5))
    labels = words.clone()
    labels[torch.rand(16, 5) < 0.5] = IGNORED
    labels[:, 0] = 1
    rows = TensorDataset(words, labels, torch.arange(16))
    module = ByRow(by_label)
    alone, model = copy.deepcopy(module), DistributedDataParallel(module)
    loader = DataLoader(rows, 2, sampler=DistributedSampler(rows, shuffle=False))
    for epoch in range(2):
        for index, (x, y, ids) in enumerate(loader):
            if not epoch and index < 2:  # as if resumed at the last batch
                continue
            y = x if not epoch else y
            module.zero_grad()
            alone.zero_grad()
            model(x=x, labels=y).backward()
            ids_by_rank = [None] * adaptive.size
            dist.all_gather_object(ids_by_rank, ids.tolist())
            whole = [row for part in dict.fromkeys(map(tuple, ids_by_rank)) for row in part]
            alone(words[whole], (labels if epoch else words)[whole]).backward()
            assert torch.allclose(module.layer.weight.grad, alone.layer.weight.grad, atol=1e-13)
    text = "the mean over labels" if by_label else "the mean over rows"
    said = capsys.readouterr().out
    if adaptive.rank == 0:
        assert said.index("is taken as the mean over labels") < said.index(f"model is {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("first", "rule"), [(0, losses.TOKENS), (1, losses.SHIFTED_TOKENS)])
def test_the_first_labels_count_or_not_where_rows_have_as_many_each(dtype, first, rule):
    torch.manual_seed(0)
    model, words = nn.Embedding(7, 7).to(dtype), torch.randint(7, (4, 6))

    def loss_of(_, batch):
        logits, labels = model(batch["x"])[:, first:], batch["labels"][:, first:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    rules = losses.compare_parts(model, loss_of, (), {"x": words, "labels": words})
    assert [
        candidate for candidate in rules if candidate in (losses.TOKENS, losses.SHIFTED_TOKENS)
    ] == [rule]
    assert rules[0] == rule
    # Half precision rounds to one in 256: what is nearer is so by chance.
    off = {losses.SUM: 3.0, losses.MEAN: 0.0, rule: 2**-8, losses.Rule("others", "mask"): 0.0}
    assert losses._fitting(off, 3.0, 2**-7) == [rule, losses.MEAN]


def test_ranks_at_different_points_are_told_so(adaptive, world):
    """Each gets what another one has sent for something else."""
    loss = adaptive._weights.new_loss("model")
    loss.observe({}, lambda: [losses.MEAN])
    sampler = PlannedBatchSampler(None, 3, adaptive)
    message = "the first batch of a loader on rank 0, a backward of a new loss on ranks 1, 2"
    calls = [lambda: adaptive._plans.begin(sampler, nn.Linear(1, 1)), loss._agree, loss._agree]
    with pytest.raises(UserError, match=message):
        calls[world.rank]()
