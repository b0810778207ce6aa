"""What each rank's memory is for in each layout, and what a forward keeps, found without one."""

import itertools
from dataclasses import replace

import pytest
import torch
from choices import by_default
from mistakes import one_line_error
from torch import nn
from torch.nn import functional
from unit.test_layouts import MB, a_job, with_ranks

from kaitian_mpi.balance.layouts import PIPELINE, REPLICATE, SHARD, predict_layouts
from kaitian_mpi.balance.memory import layout_memory
from kaitian_mpi.cli import plan, plan_memory
from kaitian_mpi.cli.plan_memory import RanksAlike, parse_ranks, requested_ranks
from kaitian_mpi.runtime.launcher import Launch
from kaitian_mpi.train.layouts.fake_forward import (
    activation_bytes,
    make_without_values,
    without_values,
)
from kaitian_mpi.train.task import Computation, Task


def one_at_a_time(job):
    """Return a job whose micro-batches are of one sample, the least that a rank computes."""
    return replace(job, chain=replace(job.chain, micro_batch=1))


JOBS = {
    "roomy": a_job([600 * MB] * 3),
    "unequal": a_job([600 * MB, 350 * MB, 350 * MB]),
    "in parts": a_job([250 * MB] * 3),
    "one layer": a_job([900 * MB] * 2, layers=1),
    "on hosts": with_ranks(a_job([900 * MB] * 2), base_bytes=200.0 * MB, is_on_host=True),
    "all at once": with_ranks(a_job([700 * MB] * 2), steps_at_once=True),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("layout", [REPLICATE, SHARD, PIPELINE])
def test_the_parts_add_up_to_what_layouts_are_chosen_by(name, layout):
    job = one_at_a_time(JOBS[name])
    (predicted,) = (
        prediction for prediction in predict_layouts(job) if prediction.layout == layout
    )
    memory = layout_memory(job, layout)
    assert memory.fits == bool(predicted.step_sec)
    if predicted.step_sec:
        totals = [rank.total for rank in memory.ranks]
        assert totals == pytest.approx(predicted.bytes_by_rank, abs=2)
    for rank in memory.ranks:
        parts = rank.parameters, rank.gradients, rank.state, rank.activations, rank.other
        assert min(parts) >= 0


def test_as_many_samples_are_computed_at_once_as_the_share_and_the_memory_permit():
    roomy, tight = (layout_memory(a_job([size * MB] * 2), REPLICATE) for size in (900, 410))
    assert {rank.samples for rank in roomy.ranks} == {16}  # half of a global batch of 32
    assert {rank.samples for rank in tight.ranks} == {10}  # replicas take 400 MB, a sample 1 MB
    assert tight.fits
    none = layout_memory(a_job([400 * MB] * 2), REPLICATE)
    assert {rank.samples for rank in none.ranks} == {1}
    assert not none.fits
    refused = replace(a_job([900 * MB]), refused={SHARD: "complex parameters"})
    assert layout_memory(refused, SHARD).why == "complex parameters"


class Attention(nn.Module):
    """An embedding, causal attention, and a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.query_key_value, self.head = nn.Linear(32, 96), nn.Linear(32, 40, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.ones(32))

    def forward(self, ids):
        x = self.tokens(ids) * self.scale
        heads = self.query_key_value(self.norm(x)).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(x + attended.transpose(1, 2).flatten(2) + torch.arange(32))


def of_texts():
    return Task(
        model=Attention(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=list(torch.randint(40, (64, 17))),
        loss=lambda model, ids: functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        ),
    )


def of_pictures():
    convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
    return Task(
        model=nn.Sequential(*convolutions, nn.Dropout(0.1), nn.Flatten(), nn.Linear(4 * 144, 10)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[(torch.randn(3, 16, 16), n % 10) for n in range(16)],
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )


def kept_by(task, computation, batch):
    """Return the bytes that a real forward keeps."""
    known = {parameter.untyped_storage().data_ptr() for parameter in task.model.parameters()}
    kept = {}

    def note(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        computation.loss(task, task.model.train(), batch)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("make", "precision"),
    by_default(
        itertools.product([of_texts, of_pictures], ["fp32", "bf16"]),
        [(of_texts, "bf16"), (of_pictures, "fp32")],
    ),
)
def test_a_forward_keeps_what_is_found_without_one(make, precision):
    computation = Computation(torch.device("cpu"), precision, "contiguous")
    real, task = make(), make_without_values(make)
    assert all(parameter.is_meta for parameter in task.model.parameters())
    batch = torch.utils.data.default_collate(real.data[:8])
    before = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    (estimate,) = activation_bytes(task, computation, batch, [[task.model]])
    measured = kept_by(real, computation, batch)
    assert estimate.kept + estimate.casts == pytest.approx(measured, rel=0.02)
    assert estimate.temporary > 0
    assert all(parameter.is_meta for parameter in task.model.parameters())  # as they were
    after = dict(task.model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_each_layer_has_its_own_bytes_and_the_parameters_none():
    model = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 7))
    task = Task(
        model=model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[(torch.zeros(4), torch.zeros(7))] * 4,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
    batch = torch.zeros(2, 4), torch.zeros(2, 7)
    computation = Computation(torch.device("cpu"), "fp32", "contiguous")
    estimates = activation_bytes(task, computation, batch, [[layer] for layer in model])
    assert [layer_bytes.output for layer_bytes in estimates] == [2 * 400, 2 * 400, 2 * 28]
    # The input; what ReLU returns, which the next layer keeps as well; the loss's difference.
    assert [layer_bytes.kept for layer_bytes in estimates] == [2 * 16, 2 * 400, 2 * 28]
    assert {layer_bytes.casts for layer_bytes in estimates} == {0}


def test_a_model_larger_than_the_machine_takes_no_memory():
    with without_values():
        model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(200)))  # 320 GB
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


def test_a_function_that_computes_with_the_model_gets_one_with_values():
    def make():
        model = nn.Linear(2, 2)
        return replace(of_texts(), model=model, name=str(model(torch.ones(1, 2)).shape[0]))

    assert make_without_values(make).name == "1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", [RanksAlike(1, "cpu", None)]),
        ("2xcuda:80GB,4xcpu", [RanksAlike(2, "cuda", 80 * 10**9), RanksAlike(4, "cpu", None)]),
        (
            "cuda:1.5GiB, cuda:600MB",
            [RanksAlike(1, "cuda", 3 << 29), RanksAlike(1, "cuda", 600 * MB)],
        ),
    ],
)
def test_ranks_are_read(text, expected):
    assert parse_ranks(text) == expected


@pytest.mark.parametrize("text", ["", "cuda:80", "0xcpu", "2 cpu", "cuda:80GB,,cpu", "x:1TB"])
def test_other_texts_are_rejected(text):
    with one_line_error("write it like 2xcuda:80GB"):
        parse_ranks(text)


def parsed(*arguments):
    return plan.read_options(arguments)


def test_a_number_of_ranks_may_come_from_n_or_a_hostfile(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=2\nb slots=1\n")
    assert requested_ranks(parsed("--memory", "cpu:1GB", "-n", "4"))[0].number == 4
    named = parsed("--memory", "cuda:80GB", "--hostfile", str(hosts))
    assert requested_ranks(named) == [RanksAlike(3, "cuda", 80 * 10**9)]
    with one_line_error("has a number of ranks, and so has -n; remove one"):
        requested_ranks(parsed("--memory", "2xcpu", "-n", "4"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--devices cpu", "--devices cannot be combined with --memory"),
        ("--world 2xcpu", "--world cannot be combined"),
        ("--save x.json", "--save cannot be combined"),
    ],
)
def test_what_an_estimate_does_not_use_is_rejected(arguments, said):
    with one_line_error(said):
        requested_ranks(parsed("--memory", "cpu", *arguments.split()))


def test_no_ranks_are_started_for_an_estimate(monkeypatch):
    monkeypatch.setattr(plan_memory, "find_launch", lambda environ: Launch(0, 2, 0, 2))
    with one_line_error("remove mpirun"):
        requested_ranks(parsed("--memory", "cpu"))
