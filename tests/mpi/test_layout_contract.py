"""What holds in every layout, each compared with one process that trains on whole batches.

That it survives the loss of a rank takes a job: see test_survival.py and test_large_models.py in
tests/e2e.
"""

import copy
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from given_layouts import LAYOUTS, given_layout, settings_of
from jobs import newest_checkpoint, summary_of, weights_in
from layers import transformer
from layout_cases import make_case, run_in_folder
from one_process import alone, compare, order_of
from safetensors.torch import load_file
from samples import BATCH, QUIET, Points
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

from kaitian_mpi import Experts, Task, Training
from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.balance.pipeline import PipelinePlan, Stage
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.engine import Engine, StepSum, apply_step
from kaitian_mpi.train.layouts import LAYOUTS as FOUND_BY_NAME
from kaitian_mpi.train.layouts.replicate import ReplicateLayout

pytestmark = pytest.mark.sizes(1, 3)

SAMPLES, EPOCHS, STEPS = 54, 2, 6  # the last step of an epoch has 6 samples
TOLERANCE = 1e-10
SHARES = [[0, 7, 17], [17, 0, 7], [7, 17, 0], [8, 8, 8], [1, 22, 1]]


# A layout that this file adds to the package.


class OwnGradients:
    """Leaves the gradients to each rank."""

    carries_number = False
    is_outdated = False

    def arm(self, weight, number=None):
        pass

    finish = check_values = reset = close = lambda self: None


class AveragingEngine(Engine):
    """Each rank steps with its own gradient; then the weights are averaged by the samples.

    With plain SGD, that is a step with the mean gradient.
    """

    def _make_gradients(self):
        return OwnGradients()

    def finish(self):
        return StepSum(is_finite=True, mean_loss=self.step.mean_loss())

    def apply(self, is_finite):
        state, share = self.state, self.step.rank_samples / self.step.samples
        if not share:  # what it has computed is of no sample
            state.zero_gradients()
        apply_step(self._task, state, is_finite, self.step.samples)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.mul_(share)
                dist.all_reduce(parameter)


class AveragingLayout(ReplicateLayout):
    name = "shard"  # of those that a config accepts
    engine = AveragingEngine


@pytest.fixture(autouse=True)
def averaging(request, monkeypatch):
    """Find the layout of this file in the place of shard, in a test that is about it."""
    if request.node.callspec.params.get("layout") == "averaging":
        monkeypatch.setitem(FOUND_BY_NAME, "shard", lambda *_: AveragingLayout())


# What all layouts train, and what one process makes of it.


def compute_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def in_float32(samples):
    inputs, targets = Points(samples)[[*range(samples)]]
    return torch.utils.data.TensorDataset(inputs.float(), targets)


def metrics(model, batch):
    return {"right": (model(batch[0]).argmax(1) == batch[1]).sum()}


def adamw(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, fused=True)


def make_task(**parts):
    usual = {
        "model": transformer(),
        "optimizer": adamw,
        "data": Points(SAMPLES),
        "loss": compute_loss,
        "clip_norm": 0.5,
        "scheduler": lambda optimizer: ExponentialLR(optimizer, 0.9),
        "validation": Points(50),
    }
    return Task(**{**usual, **parts})


def parts_of(layout):
    """Return the parts of a task that a layout needs."""
    if layout == "averaging":
        return {
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
            "clip_norm": None,
        }
    return {"model": transformer(has_experts=True)} if layout == "experts" else {}


def give_experts(world, count):
    """Return the ranks of experts, and of their mirrors; one of three ranks has none."""
    ranks = [0, 2] if world.size == 3 else [0]
    owners = [ranks[number % len(ranks)] for number in range(count)]
    mirrors = [1 if world.size == 3 and number % 3 == 0 else NO_MIRROR for number in range(count)]
    return owners, mirrors


def make_plan(world, layers, micro_batch=5):
    """Return stages of one rank each, or the last of two."""
    count = min(2, world.size)
    ranks = [(0,), (1, 2)] if world.size == 3 else [(rank,) for rank in range(world.size)]
    ends = [layers // 2, layers][-count:]
    stages = tuple(
        Stage(begin, end, stage_ranks, tuple(1.0 + rank for rank in stage_ranks))
        for begin, end, stage_ranks in zip([0, *ends], ends, ranks, strict=False)
    )
    return PipelinePlan(stages, micro_batch, bytes_by_rank=(0,) * world.size)


def steps_of(training, is_open):
    """Yield the steps of a training in the closed form, or with a loss of the script's own."""
    if not is_open:
        yield from training
        return
    for batch in training.batches():
        training.backward(compute_loss(training.model, batch))
        training.step()
        yield training.last_step


def train(world, layout, task, folder, until=STEPS, **settings):
    """Train until a step, from where the folder's run has stopped; return the steps.

    The ranks' shares change with each step, where they are shares of the samples.
    """
    size = world.size
    planned = given_layout(
        layout,
        shares=lambda: SHARES[0] if size == 3 else [BATCH],
        stages=partial(make_plan, world),
        memory=lambda: [3, 1, 2][:size],
        experts=partial(give_experts, world),
        bucket_caps=(1 << 10, 1 << 12),
    )
    where = {"run_dir": str(folder / "run"), "resume": "auto", "quiet": True}
    options = {**QUIET, "epochs": EPOCHS, "micro_batch_size": 9, "benchmark_seconds": 0.05}
    options |= where | settings_of(layout) | settings
    steps = []
    with planned, redirect_stdout(StringIO()), Training(task, **options) as training:
        for step in steps_of(training, is_open=task.loss is None):
            steps.append(step)
            if size == 3 and layout != "pipeline":
                shares = SHARES[step.number % len(SHARES)]
                training._session.loop.sampler.set_plan(shares)
            if step.number == until < STEPS:
                break
    world.comm.Barrier()  # rank 0 has written the last file
    return steps


def compare_with_one_process(world, task, steps, folder, epochs=EPOCHS):
    """Compare losses, and what the run in a folder has saved, with one process; return its model.

    The task has its initial weights.
    """
    batches = [task.data[indices] for indices in order_of(SAMPLES, BATCH, epochs)]
    assert [step.number for step in steps] == list(range(1, len(batches) + 1)) or world.rank
    model, optimizers, losses = alone(world, task, batches)
    if world.rank == 0:
        assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-10)
        saved = torch.load(newest_checkpoint(folder), weights_only=True)
        compare(dict(saved["model"]), dict(model.state_dict()), TOLERANCE)
        for saved_optimizer, optimizer in zip(saved["optimizers"], optimizers, strict=True):
            compare(saved_optimizer["state"], optimizer.state_dict()["state"], TOLERANCE)
            compare(saved_optimizer["param_groups"], optimizer.state_dict()["param_groups"])
    return model


@pytest.mark.parametrize(
    ("layout", "is_open"),
    [
        *(
            pytest.param(layout, is_open, marks=pytest.mark.thorough(1))
            for layout, is_open in (
                *[("replicate", False), ("shard", True), ("parts", True)],
                *[("pipeline", False), ("averaging", False)],
            )
        ),
        ("experts", True),
        *by_default([("mirrors", False), ("averaging", True), ("experts", False)], ()),
    ],
)
def test_steps_results_and_files_are_those_of_one_process(world, shared_path, layout, is_open):
    task = make_task(metrics=metrics, **parts_of(layout))
    initial = replace(task, model=copy.deepcopy(task.model))
    task = replace(task, loss=None if is_open else task.loss)
    file = shared_path / "model.safetensors"
    steps = train(world, layout, task, shared_path, export=str(file))
    expected = compare_with_one_process(world, initial, steps, shared_path)
    if world.rank == 0:
        right = metrics(expected, Points(50)[[*range(50)]])["right"] / 50
        assert summary_of(shared_path)["validation"] == pytest.approx({"right": float(right)})
        compare(dict(weights_in(shared_path)), dict(expected.state_dict()), TOLERANCE)
        # A weight that is tied has one name in this format.
        compare(load_file(file), dict(expected.named_parameters()), TOLERANCE)


CHAINS = {
    "in turn": ["parts", "mirrors", "pipeline", "replicate", "shard", "parts"],
    "each second": ["pipeline", "shard", "mirrors", "replicate", "parts", "pipeline"],
}
CHAINS |= {"experts": ["experts", "mirrors", "experts", "pipeline", "experts", "replicate"]}
for name, chain in [*CHAINS.items()]:
    CHAINS[f"{name}, back"] = chain[::-1]
"""Each layout continues from each other one."""


@pytest.mark.thorough
@pytest.mark.sizes(4)
@pytest.mark.parametrize("layout", ["experts"])
def test_a_layout_continues_on_other_numbers_of_ranks(world, shared_path, layout):
    """Ten times, from a checkpoint of fewer or more; the other ranks are on standby."""
    parts = partial(parts_of, layout)
    initial, steps, ranks = make_task(**parts()), [], [4, 1, 3, 2, 4, 3, 1, 2, 3, 4, 2]
    options = QUIET | {"layout": layout, "epochs": 4, "run_dir": str(shared_path / "run")}
    for stop, count in enumerate(ranks, 1):
        options |= {"spares": world.size - count, "resume": "auto", "quiet": True}
        with Training(make_task(**parts()), **options) as training:
            for step in training:
                assert training._session.loop.world.size == count
                steps.append(step)
                if step.number == stop < len(ranks):
                    break
        world.comm.Barrier()  # rank 0 has written the last file
    compare_with_one_process(world, initial, steps, shared_path, epochs=4)


@pytest.mark.sizes(3)
@pytest.mark.parametrize("name", by_default(CHAINS, ("each second",)))
def test_a_layout_continues_from_a_checkpoint_of_another(world, shared_path, name):
    parts = partial(parts_of, "experts" if "experts" in CHAINS[name] else "")
    initial, steps = make_task(**parts()), []
    for step, layout in enumerate(CHAINS[name], 1):
        steps += train(world, layout, make_task(**parts()), shared_path, until=step)
    expected = compare_with_one_process(world, initial, steps, shared_path)
    if world.rank == 0:
        loss = compute_loss(expected, Points(50)[[*range(50)]]).detach()
        validation = summary_of(shared_path)["validation"]
        assert validation == pytest.approx({"loss": float(loss)})


@pytest.mark.sizes(3)
@pytest.mark.parametrize("layout", by_default([*LAYOUTS, "experts"], ("replicate", "pipeline")))
def test_steps_in_fp16_are_near_those_in_fp32(world, shared_path, layout):
    """But for the first ones, whose scale is too large: no rank takes these."""
    middle = nn.Linear(16, 16)
    if layout == "experts":  # all chosen, as rounding may change a choice
        middle = Experts([middle, nn.Linear(16, 16)], nn.Linear(16, 2), top_k=2)
    task = make_task(
        model=nn.Sequential(nn.Linear(3, 16), nn.Tanh(), middle, nn.Linear(16, 4)),
        data=in_float32(SAMPLES),
        loss=lambda model, batch: 16 * compute_loss(model, batch),
        validation=None,
    )
    initial = replace(task, model=copy.deepcopy(task.model))
    steps = train(world, layout, task, shared_path, precision="fp16", max_bad_steps=0)
    taken = gather_values(world.comm, [step.is_finite for step in steps])
    assert taken == [taken[0]] * world.size
    assert 0 < sum(taken[0]) < STEPS
    order = order_of(SAMPLES, BATCH, EPOCHS)
    batches = [
        task.data[indices] for indices, is_taken in zip(order, taken[0], strict=True) if is_taken
    ]
    expected, *_ = alone(world, initial, batches)
    if world.rank == 0:
        for name, weights in weights_in(shared_path).items():
            assert (weights - expected.state_dict()[name]).abs().max() < 2e-3, name


@pytest.mark.sizes(3)
@pytest.mark.parametrize("layout", by_default([*LAYOUTS, "experts"], ("shard", "experts")))
def test_weight_decay_leaves_alone_what_no_loss_depends_on(world, layout):
    """Some parameters have no gradient in any rank's micro-batch, some in one of them."""
    case = replace(
        make_case(1),
        blocks=[
            *["unused", "sometimes", "linear", "unused", "sometimes"],
            *(["mixture"] if layout == "experts" else []),
        ],
        is_text=False,
        optimizers=["sgd", "adamw"],
        left_out=0,
        clip=0.5,
        loss="counted nan",
        frozen=0,
        changes={},
        form="closed",
        micro_batch=2,
        layouts=[layout],
        stops=[],
    )
    assert run_in_folder(case, world) == "right"
