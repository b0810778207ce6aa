"""Layout pipeline trains as one process does, whoever computes which layers."""

import copy
import errno
import itertools
import os
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from layers import Joins, Splits, Tied
from one_process import alone
from samples import BATCH, QUIET, Points
from shared.loops import LoopMaker
from torch import nn
from torch.utils.checkpoint import checkpoint

from kaitian_mpi import Training
from kaitian_mpi.balance.layouts import Prediction
from kaitian_mpi.balance.pipeline import PipelinePlan, Stage
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe import tensor_files
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.train.checkpoint.writer import Checkpoints
from kaitian_mpi.train.layouts import choose
from kaitian_mpi.train.layouts.choose import choose_layout, measure_layouts
from kaitian_mpi.train.layouts.pipeline import pipeline_layout
from kaitian_mpi.train.layouts.pipeline.chain import chain_of
from kaitian_mpi.train.layouts.pipeline.layer_timer import CastMode
from kaitian_mpi.train.layouts.pipeline.measure import StagesPlan, find_facts
from kaitian_mpi.train.layouts.pipeline.pipeline_layout import PipelineLayout
from kaitian_mpi.train.layouts.pipeline.runner import Runner
from kaitian_mpi.train.layouts.shard.shard_layout import ShardLayout
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task

pytestmark = pytest.mark.sizes(1, 2, 3)

LOSS = nn.CrossEntropyLoss()


def make_task(is_tied=False, **parts):
    torch.manual_seed(5)
    first = nn.Linear(3, 40)
    layers = [first, nn.Tanh(), nn.Linear(40, 40), nn.ReLU(inplace=True), nn.Linear(40, 40)]
    layers += [Tied(first), nn.Linear(3, 4)] if is_tied else [nn.Linear(40, 4)]
    usual = {
        "model": nn.Sequential(*layers).double(),
        "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        "data": Points(),
        "loss": lambda m, batch: LOSS(m(batch[0]), batch[1]),
        "clip_norm": 0.5,
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.98),
    }
    return Task(**{**usual, **parts})


def plan_of(world, task, micro_batch, replicas=1):
    """Split the layers over the ranks, the last stage having so many of them."""
    layers, size = len(chain_of(task)), world.size
    alone_in_stage = max(0, size - replicas)
    ends = [1 + i * (layers - 1) // size for i in range(alone_in_stage)]
    begins = [0, *ends]
    ranks = [(rank,) for rank in range(alone_in_stage)] + [tuple(range(alone_in_stage, size))]
    stages = tuple(
        Stage(begin, end, stage_ranks, tuple(1.0 + rank for rank in stage_ranks))
        for begin, end, stage_ranks in zip(begins, [*ends, layers], ranks, strict=True)
    )
    return PipelinePlan(stages, micro_batch, bytes_by_rank=(0,) * size)


class GivenStages(PipelineLayout):
    """Layout pipeline without measurements."""

    def __init__(self):
        pass


class Run:
    """A pipeline's run, loop by loop."""

    def __init__(self, world, task, plan):
        self.world, self.task = world, task
        config = TrainConfig(global_batch_size=BATCH, log_interval=60, epochs=9, layout="pipeline")
        self.maker = LoopMaker(config, world, task, GivenStages())
        self.setup, self.state = self.maker.setup, self.maker.state
        self.make_loop(plan)

    def make_loop(self, pipeline):
        size = self.world.size
        sizes = split_micro_batches(BATCH, pipeline.micro_batch)
        plan = StagesPlan(
            batch_sizes=pipeline.first_samples(sizes, size),
            scores=[1.0] * size,
            costs=None,
            micro_batch_size=None,
            pipeline=pipeline,
        )
        with redirect_stdout(StringIO()):  # which says who has what
            self.loop = self.maker.make(plan)

    def epoch(self):
        """Yield each step with its samples."""
        while True:
            begin = self.state.progress.position
            if (parts := self.loop.fetch()) is None:
                break
            step = self.loop.train(parts)
            yield step, self.loop.sampler.indices(begin, step.samples)

    def close(self):
        self.loop.close()
        self.maker.close()


def compare_with_one_process(run, initial, taken, tmp_path):
    data = run.setup.train
    task = Task(**{**vars(run.task), "model": initial})
    expected, optimizers, _ = alone(run.world, task, [data[indices] for indices in taken])
    pieces = itertools.count()
    shared, _ = run.state.collect(run.world, tmp_path, lambda: next(pieces))
    others_own = any(ranks[0] != 0 for ranks in run.state.partition.owners)
    assert (next(pieces) > 0) is (run.world.rank == 0 and others_own)
    if run.world.rank == 0:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(shared["model"][name], value, rtol=1e-10, atol=1e-10)
        saved_state = shared["optimizers"][0]["state"]
        for number, state in optimizers[0].state_dict()["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(saved_state[number][name], value, rtol=1e-10, atol=1e-10)


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(world, tmp_path, monkeypatch):
    """Where the parts of other ranks are to be collected, before the checkpoint is written."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    task = make_task()
    run = Run(world, task, plan_of(world, task, 5))
    checkpoints = Checkpoints(TrainConfig(), tmp_path)
    metadata = SimpleNamespace(to_json=dict)
    monkeypatch.setattr(tensor_files, "_MIN_SPOOLED_BYTES", 0)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        checkpoints.save(world, run.state, metadata)
    written, fault = checkpoints.on_disk.last_written, checkpoints.on_disk.fault
    if world.rank == 0 and world.size > 1:
        assert (written, fault) == (None, "No space left on device")
    checkpoints.save(world, run.state, metadata)
    run.close()
    if world.rank == 0:
        assert (checkpoints.on_disk.last_written, checkpoints.on_disk.fault) == (0, None)


@pytest.mark.sizes(2, 3)
@pytest.mark.thorough(2)
def test_stages_that_move_while_a_job_trains_continue_as_one_process(
    world, shared_path, monkeypatch
):
    """After the first epoch, the first rank seems to be slow."""
    found = [([50.0] + [1.0] * (world.size - 1), "new stages")]
    monkeypatch.setattr(pipeline_layout, "replan", lambda *_: found.pop() if found else None)
    task, taken, loops = make_task(is_tied=True), [], []
    initial = copy.deepcopy(task.model)
    settings = {**QUIET, "balance": "adaptive", "epochs": 2, "layout": "pipeline"}
    settings |= {"run_dir": str(shared_path / "run"), "benchmark_seconds": 0.05}
    with Training(task, **settings) as training:
        for step in training:
            begin = step.number * BATCH % 168 - BATCH  # of 7 steps an epoch
            sampler = training._session.loop.sampler
            taken.append(sampler.indices(begin if begin >= 0 else 144, step.samples))
            loops.append(training._session.loop)
    assert len(set(loops)) == 2
    task_alone = Task(**{**vars(task), "model": initial})
    expected, *_ = alone(world, task_alone, [task.data[indices] for indices in taken])
    if world.rank == 0:
        saved = torch.load(shared_path / "run/checkpoints/model.pt")
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.sizes(1, 2)
def test_batch_norms_of_a_stage_reach_the_others(world):
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    task = make_task(model=nn.Sequential(*layers).double(), clip_norm=None)
    run = Run(world, task, plan_of(world, task, 8))
    next(run.epoch())
    run.loop.evaluate()
    means = task.model[1].running_mean.tolist()
    assert any(means)
    assert gather_values(world.comm, means) == [means] * world.size
    assert task.model[1].num_batches_tracked == 3
    run.close()


class Derives(nn.Module):
    """Uses its parameter by torch.func, and has one without rows."""

    def __init__(self):
        super().__init__()
        self.weight, self.empty = nn.Parameter(torch.ones(4, 4) / 8), nn.Parameter(torch.ones(0, 4))

    def forward(self, x):
        product = torch.func.vmap(lambda row: row @ self.weight)(x) + self.empty.sum()
        ones = torch.ones_like(self.weight)
        return product + torch.func.jvp(lambda weight: x @ weight, (self.weight,), (ones,))[1]


def freeze(model, is_frozen):
    for layer in (model[0], model[4].linear):
        layer.requires_grad_(not is_frozen)


@pytest.mark.thorough
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_of_any_kind_train_as_in_one_process(world, tmp_path, replicas):
    """A module used twice, tuples, changes in place, frozen layers, some without an optimizer.

    Parameters are unfrozen between two steps; the norm counts those that no optimizer has.
    """
    torch.manual_seed(5)
    shared, act = nn.Linear(8, 8), nn.Tanh()
    layers = [nn.Linear(3, 8), act, shared, act, Splits(8, "tuple"), Joins(), shared, act]
    layers += [nn.Linear(8, 4), Derives(), nn.Linear(4, 4)]
    model = nn.Sequential(*layers).double()
    freeze(model, True)
    initial = copy.deepcopy(model)
    parts = {"clip_norm": 0.1, "scheduler": None}
    task = make_task(
        model=model,
        optimizer=lambda m: torch.optim.SGD([*m.parameters()][:-2], lr=0.5, momentum=0.9),
        **parts,
    )
    optimizer = task.make_optimizers(initial)[0]
    run = Run(world, task, plan_of(world, task, 5, replicas))
    for step, indices in itertools.islice(run.epoch(), 5):
        initial.zero_grad()
        task.loss(initial, run.setup.train[indices]).backward()
        nn.utils.clip_grad_norm_(initial.parameters(), 0.1)
        optimizer.step()
        if step.number == 2:
            freeze(model, False)
            freeze(initial, False)
    run.close()
    shared, _ = run.state.collect(world, tmp_path)
    run.state.partition.drop()
    if world.rank == 0:
        for name, value in initial.state_dict().items():
            torch.testing.assert_close(shared["model"][name], value, rtol=1e-10, atol=1e-10)
        run.state.partition.take(shared["model"], shared["optimizers"])
    assert run.state.partition.is_complete(world.comm)


@pytest.mark.sizes(2)
def test_the_values_of_other_stages_raise_an_error_that_says_where_they_are(world):
    task = make_task()
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    run = Run(world, task, plan_of(world, task, 5))
    numbers = [n for n, ranks in enumerate(run.state.partition.owners) if world.rank not in ranks]
    others = [parameter for n, parameter in enumerate(task.model.parameters()) if n in numbers]
    assert 0 < len(others) < len(names)
    for parameter in others:
        assert parameter.device.type == world.device.type
        parameter.requires_grad_(parameter.requires_grad)
        for use in (torch.clone, torch.Tensor.detach, copy.deepcopy, lambda p: p + 1):
            with pytest.raises(UserError, match=f"{names[id(parameter)]} is in the stage of an"):
                use(parameter)
    next(run.epoch())
    run.close()


@pytest.mark.sizes(2)
def test_a_loss_draws_the_same_in_the_first_stage_and_in_the_last(world):
    """As the noise of a diffusion model, which here returns what it is given: its loss is 0."""

    def loss(model, batch):
        noise = torch.rand_like(batch[0])
        return (model(batch[0] + noise) - batch[0] - noise).square().mean()

    layers = [nn.Linear(3, 3, bias=False).double() for _ in range(2)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    task = make_task(model=nn.Sequential(*layers), loss=loss, optimizer=sgd, validation=Points(50))
    run = Run(world, task, plan_of(world, task, 5))
    for step, _ in itertools.islice(run.epoch(), 2):
        assert step.loss < 1e-20
    assert run.loop.evaluate()["loss"] < 1e-20
    run.close()


class Sparse(nn.Embedding):
    def __init__(self):
        super().__init__(5, 4, sparse=True)

    def forward(self, x):
        return super().forward(x[:, 0].long() % 5)


def twice(model, batch):
    return LOSS(model(batch[0]) + model(batch[0]), batch[1])


def pairs(model, batch):
    return LOSS(model(batch[0].float(), batch[0].float()), batch[1])


@pytest.mark.sizes(1)
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": twice}, "more than once"),
        ({"loss": lambda m, b: LOSS(m[0](b[0]), b[1])}, "uses model\\[0\\]"),
        ({"loss": lambda m, b: m.weight.sum()}, "uses model.weight"),
        ({"loss": lambda m, b: b[0].sum()}, "does not call the model"),
        ({"loss": None}, "require Task\\(loss=...\\)"),
        ({"clip_norm": lambda parameters: None}, "to be a number"),
        ({"model": nn.Sequential(Sparse(), nn.Linear(4, 4)).double()}, "gradients must be dense"),
        ({"model": nn.Bilinear(3, 3, 4)}, "requires Task\\(layers=\\[...\\]\\)"),
    ],
)
def test_a_task_that_cannot_be_divided_is_refused(world, parts, message):
    kinds = {"model": nn.Linear(3, 4), "layers": ()} if "loss" in parts else {}
    if kinds:
        kinds = {"model": (model := nn.Linear(3, 4).double()), "layers": [model]}
    task = make_task(**{**kinds, **parts})
    setup, config = Setup(task, NoFolder()), TrainConfig(layout="pipeline", balance="off")
    with pytest.raises(UserError, match=message):
        find_facts(config, setup, world)


@pytest.mark.thorough
@pytest.mark.sizes(2)
def test_auto_does_not_choose_what_the_task_or_a_setting_rules_out(world, monkeypatch):
    exchange = choose.measure_exchange(world, 1 << 16)
    monkeypatch.setattr(choose, "measure_exchange", lambda *_: exchange)
    clips, both = {"clip_norm": lambda parameters: None}, ["pipeline", "shard"]
    for parts, settings, expected in (
        ({}, {}, []),
        (clips, {}, both),
        ({}, {"sync_bn": True}, ["pipeline"]),
        ({}, {"wire": "int8"}, both),
        ({"loss": twice}, {}, ["pipeline"]),
        ({"loss": lambda m, b: LOSS(m[5](m[:5](b[0])), b[1])}, {}, ["pipeline"]),
        ({"model": nn.Bilinear(3, 3, 4), "loss": pairs}, {}, ["pipeline"]),
    ):
        config = TrainConfig(layout="auto", benchmark_seconds=0.02, **settings)
        setup = Setup(make_task(**parts), NoFolder())
        measured = measure_layouts(config, setup, world)
        refused = measured[0].refused
        assert sorted(refused) == expected, settings
        assert all(len(why) < 110 and ";" not in why for why in refused.values())
        with monkeypatch.context() as known:
            known.setattr(choose, "measure_layouts", lambda *_, measured=measured: measured)
            assert choose_layout(config, setup, world).name not in expected
    with pytest.raises(UserError, match="auto require Task"):
        choose_layout(TrainConfig(layout="auto"), Setup(make_task(loss=None), NoFolder()), world)


@pytest.mark.sizes(1)
def test_layers_that_are_not_the_models_are_refused(world):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    for layers, message in (
        ([model[0], model[1]], "lack 2.weight, 2.bias"),
        ([model[0], model[2]], "return something else than the model"),
    ):
        task = make_task(model=model, layers=layers)
        setup, config = Setup(task, NoFolder()), TrainConfig(layout="pipeline", balance="off")
        with pytest.raises(UserError, match=message):
            find_facts(config, setup, world)


class Again(nn.Module):
    """Computes its layer again in backward, and without a gradient in forward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


@pytest.mark.sizes(1)
@pytest.mark.parametrize("computes_again", [False, True])
def test_micro_batches_share_the_copies_that_autocast_makes_of_weights(world, computes_again):
    torch.manual_seed(2)
    middle = nn.Linear(16, 16)
    layers = nn.Linear(3, 16), nn.Tanh(), Again(middle) if computes_again else middle
    task = make_task(model=nn.Sequential(*layers, nn.Linear(16, 4)))
    computation = Computation(world.device, "bf16", "contiguous")
    chain, count = chain_of(task), 4
    stages = [Stage(0, len(chain), (0,), (1.0,))]
    runner = Runner(task, chain, computation, stages, 0, 0, waits=lambda _: nullcontext())
    batches = {number: (torch.randn(5, 3), torch.arange(5) % 4) for number in range(count)}
    with CastMode(list(task.model.parameters())) as mode:
        runner.train(count, batches, dict.fromkeys(batches, 0.25), range(count))
    assert mode.count == 6 if not computes_again else mode.count > 6 * count
    gradients = [parameter.grad.clone() for parameter in task.model.parameters()]
    task.model.zero_grad()
    for batch in batches.values():
        (computation.loss(task, task.model, batch) * 0.25).backward()
    for gradient, parameter in zip(gradients, task.model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.sizes(1)
def test_copies_that_autocast_makes_of_weights_are_no_samples_memory(world):
    task = make_task(
        model=nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 4)),
        loss=lambda model, batch: LOSS(model(batch[0].float()), batch[1]),
    )
    setup = Setup(task, NoFolder())
    settings = {"layout": "pipeline", "global_batch_size": BATCH, "benchmark_seconds": 0.2}
    layers = {
        precision: find_facts(TrainConfig(**settings, precision=precision), setup, world).layers
        for precision in ("fp32", "bf16")
    }
    assert [layer.cast_bytes for layer in layers["fp32"]] == [0, 0, 0]
    # In half of the weights' bytes; the input and the output of each linear layer.
    assert [layer.cast_bytes for layer in layers["bf16"]] == [2 * 64 * 4, 0, 2 * 65 * 4]
    assert layers["bf16"][0].kept_bytes <= layers["fp32"][0].kept_bytes


class Counting(nn.Linear):
    """Notes how many samples each of its calls has."""

    def __init__(self):
        super().__init__(3, 4)
        self.calls = []

    def forward(self, x):
        self.calls.append(len(x))
        return super().forward(x)


@pytest.mark.sizes(2)
def test_layers_of_ranks_taken_alike_run_only_as_their_bytes_require(world, monkeypatch):
    """Equal stages follow from no times."""
    timed = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: timed.append(True))
    calls = {}
    config = TrainConfig(layout="pipeline", global_batch_size=BATCH)
    for takes_alike in (True, False):
        layer = Counting()
        setup = Setup(make_task(model=nn.Sequential(layer, nn.Tanh()).double()), NoFolder())
        find_facts(config, setup, world, takes_alike=takes_alike)
        calls[takes_alike] = [layer.calls.count(size) for size in {*layer.calls}]
        assert bool(timed) is not takes_alike
    assert max(calls[True]) < max(calls[False])


class Large(nn.Linear):
    """Runs out of memory with more samples than some."""

    most = 0

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("tried to allocate")
        return super().forward(x)


@pytest.mark.sizes(2)
def test_a_layer_that_is_too_large_to_be_timed_leaves_layout_shard(world, capfd):
    """One rank alone has too little memory; with few samples, it has enough."""
    layers = Large(3, 40), nn.Tanh(), nn.Linear(40, 4)
    task = make_task(model=nn.Sequential(*layers).double())
    settings = {"global_batch_size": BATCH, "benchmark_seconds": 0.1}
    config, setup = TrainConfig(**settings, layout="auto"), Setup(task, NoFolder())
    layers[0].most = 4 if world.rank else 10**6
    assert len(find_facts(config, setup, world).layers) == 3
    layers[0].most = 0 if world.rank else 10**6
    assert choose_layout(config, setup, world).name == "shard"
    if world.rank == 0:
        assert (
            "layout shard: others are not possible, or slower (rank 1: cpu"
            in capfd.readouterr().out
        )
    with pytest.raises(AgreedError, match=r"a sample through layer 1 of 3 \(Large\); give"):
        find_facts(TrainConfig(**settings, layout="pipeline"), setup, world)
    whole = Task(**{**vars(task), "layers": None, "model": Hidden(task.model)})
    assert choose_layout(config, Setup(whole, NoFolder()), world).name == "shard"


@pytest.mark.sizes(2)
def test_a_layout_that_does_not_fit_after_all_leaves_the_next_one(world, monkeypatch, capfd):
    """Timing the layouts takes memory, too."""

    def find(*_):
        raise AgreedError("--layout shard: gradients take 9 MB; use a smaller model")

    predictions = [Prediction("replicate", why="large"), *map(predicted, ("shard", "pipeline"))]
    monkeypatch.setattr(choose, "predict_layouts", lambda _: predictions)
    monkeypatch.setattr(ShardLayout, "find", find)
    config = TrainConfig(layout="auto", global_batch_size=BATCH, benchmark_seconds=0.1)
    assert choose_layout(config, Setup(make_task(), NoFolder()), world).name == "pipeline"
    if world.rank == 0:
        text = capfd.readouterr().out
        assert "layout shard does not fit after all: gradients take 9 MB" in text
        assert "layout pipeline: the fastest that fits" in text


def predicted(layout):
    return Prediction(layout, step_sec=1.0)


class Hidden(nn.Module):
    """Is no chain."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)
