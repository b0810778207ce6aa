"""The parts of training that need no other ranks, and what a job that resumes a run does."""

import copy
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe.console import fit_table, table_lines
from kaitian_mpi.observe.run_folder import open_run_folder
from kaitian_mpi.recipes.image_classification import Schedule, make_optimizer
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.train.checkpoint.metadata import (
    INVALIDATES,
    REJECTED,
    SILENT,
    Invalidated,
    compare_flags,
)
from kaitian_mpi.train.checkpoint.resume import is_over
from kaitian_mpi.train.evaluation import evaluate
from kaitian_mpi.train.progress import Progress, TimeLeft
from kaitian_mpi.train.step_times import StepClock
from kaitian_mpi.train.summary import Summary
from kaitian_mpi.train.task import Task


def test_the_learning_rate_is_the_one_asked_for():
    for schedule, progress, expected in (
        *(("cosine", 0.125, 0.5), ("cosine", 0.25, 1.0), ("cosine", 0.625, 0.5)),
        *(("cosine", 1.0, 0.0), ("constant", 0.125, 0.5), ("constant", 0.9, 1.0)),
    ):
        rate = Schedule(TrainConfig(lr=1.0, warmup=0.25, schedule=schedule), None).rate
        assert rate(progress) == pytest.approx(expected)
    assert Schedule(TrainConfig(lr=2.0, warmup=0.0), None).rate(0.0) == pytest.approx(2.0)


def test_the_optimizer_is_the_one_asked_for():
    config = parse_config("kaitian-train", ["--optimizer", "adamw", "--lr", "0.01"])
    optimizer = make_optimizer(config, build_model("cnn", 10))
    assert type(optimizer) is torch.optim.AdamW
    decayed, spared = optimizer.param_groups
    assert (decayed["lr"], decayed["weight_decay"]) == (0.01, 0.01)
    assert (spared["lr"], spared["weight_decay"]) == (0.01, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])
    assert type(make_optimizer(TrainConfig(), build_model("cnn", 10))) is torch.optim.SGD


def test_time_left_is_by_the_last_steps_and_the_evaluations():
    left = TimeLeft()
    for steps, seconds, expected in (
        (1, 8.0, None),  # the first step, which prepares much
        (1, 2.0, None),
        (1, 4.0, 10 * 3.0 + 2 * 5.0),
        (2, 4.0, 10 * 2.5 + 2 * 5.0),
    ):
        left.steps_done(steps, seconds)
        assert left.estimate(10, 2, evaluation_sec=5.0) == expected
    left.evaluation_done(20.0)
    left.evaluation_done(10.0)
    assert left.estimate(10, 2, evaluation_sec=5.0) == 10 * 2.5 + 2 * 15.0
    for _ in range(20):  # the means are over the last minute only
        left.steps_done(10, 6.0)
    assert left.estimate(10, 0, evaluation_sec=5.0) == pytest.approx(10 * 0.6)
    at_once = TimeLeft()
    at_once.steps_done(100, 50.0)
    assert at_once.estimate(1, 1, evaluation_sec=0.0) == 0.5


BUCKET, SUMMED = "bucket", "summed"
FORWARD, BACKWARD, WAIT = StepClock.FORWARD, StepClock.BACKWARD, "waiting for something"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Seconds of the forward, and then of what follows it.
        ((1.0, BACKWARD, 2.0, BUCKET, 0.5, SUMMED, 4.0), (1.0, 2.0, 4.0, 0.5)),
        ((1.0, BACKWARD, 2.0, SUMMED, 4.0), (0.0, 0.0, 4.0, 3.0)),  # no bucket: all is waiting
        (
            (*(0.75, WAIT, 0.25, FORWARD, 0.25, BACKWARD, 2.0, FORWARD, 1.0, BACKWARD, 0.5),
             *(WAIT, 0.5, BACKWARD, 4.0, BUCKET, 8.0, SUMMED, 16.0)),
            (2.0, 6.5, 16.0, 8.75),
        ),
        (  # what a rank waits for after its last bucket
            (1.0, BACKWARD, 2.0, BUCKET, 0.5, WAIT, 4.0, BACKWARD, 0.25, SUMMED, 8.0),
            (1.0, 2.0, 8.0, 4.75),
        ),
        (  # buckets of two micro-batches, and a wait between them
            (*(1.0, BACKWARD, 2.0, BUCKET, 0.25, WAIT, 4.0, BACKWARD, 0.25),
             *(FORWARD, 0.5, BACKWARD, 8.0, BUCKET, WAIT, 16.0, BACKWARD, SUMMED, 0.5)),
            (1.5, 10.5, 0.5, 20.0),
        ),
    ],
)  # fmt: skip
def test_the_step_clock_tells_phases_from_waiting(monkeypatch, parts, expected):
    at, device = 0.0, CpuDevice()
    monkeypatch.setattr("time.perf_counter", lambda: at)
    clock = StepClock(device)
    assert clock.enter(WAIT) == ""  # a script calls the model before the first step
    for _ in range(2):
        phase = FORWARD
        clock.start()
        for part in parts:
            if isinstance(part, float):
                at += part
            elif part == BUCKET:
                clock.gradients_ready()
            elif part == SUMMED:
                clock.gradients_summed()
            else:
                assert clock.enter(part) == phase
                phase = part
        clock.stop()
    assert clock.take() == (2, *(2 * seconds for seconds in expected))
    assert clock.take() == (0, 0.0, 0.0, 0.0, 0.0)


def test_a_table_is_aligned_text():
    line = "+------+--------+"
    head, first, second = "| rank | host   |", "|    0 | a      |", "|    1 | longer |"
    rows = [("rank", "host"), ("0", "a"), ("1", "longer")]
    assert table_lines(rows, left=("host",)) == [line, head, line, first, second, line]


def test_a_table_fits_a_terminal():
    heads = ("rank", "group", "ms: step + sample", "varies", "memory", "computes in", "score")
    heads += ("samples/step", "emulated")
    one = ("0", "gpu", "6.8 + 0.63", "±12%", "all", "fp32 channels_last", "1.00", "203", "")
    two = ("1", "mlu", "25.6 + 2.02", "±4%", "all", "fp32 channels_last", "0.31", "53", "slowed 3x")
    common, rows = fit_table([heads, one, two], left=("group", "computes in"))
    assert common == ["computes in fp32 channels_last", "memory all"]
    assert {len(line) for line in table_lines(rows, left=("group",))} == {80}
    heads = ("rank", "host", "device")
    rows = [heads, ("0", "a", "x" * 90), ("1", "b", "y" * 90)]
    common, rows = fit_table(rows, left=("host", "device"))
    assert common == []
    assert {len(line) for line in table_lines(rows, left=("host", "device"))} == {80}
    assert rows[1][2].endswith("xx…")
    why = "needs 1,234 MB on rank 1, which has 1,000 MB for its gradients and the optimizer"
    common, rows = fit_table(
        [["layout", "ms", ""], ["shard", "-", why], ["auto", "5.0", ""]], ("", "layout")
    )
    assert max(map(len, table_lines(rows, left=("",)))) <= 80
    assert " ".join(row[2] for row in rows[1:]).strip() == why
    assert [row[:2] for row in rows[1:]] == [["shard", "-"], ["", ""], ["auto", "5.0"]]
    small = [["rank"], ["0"]]
    assert fit_table(small, left=()) == ([], small)


def test_only_rank_0_writes_complete_files_without_lines_of_repeated_steps(tmp_path):
    path = tmp_path / "run"
    config = TrainConfig(run_dir=str(path))
    for rank in (1, 0):
        folder = open_run_folder(config, rank)
        folder.write("summary.json", {"finished": False})
        folder.write("summary.json", {"finished": True})
        folder.append("plan.jsonl", {"step": 0})
        folder.save_model({"weight": torch.ones(2)})
        assert path.exists() == (rank == 0)
        assert folder.read("summary.json") == ({} if rank else {"finished": True})
    assert not list(path.rglob("*.partial"))
    for text in ("{", "[1]", "\0"):
        (path / "summary.json").write_text(text)
        assert folder.read("summary.json") == {}
    folder = open_run_folder(TrainConfig(run_dir=str(tmp_path / "again")), rank=0)
    for name in ("metrics.jsonl", "plan.jsonl", "events.jsonl"):
        for step in (0, 4, 8, 12):
            folder.append(name, {"step": step})
    (folder.path / "metrics.jsonl").open("a").write('"no step"\n{"other": 1}\nbroken\n')
    folder.cut_after(8)
    kept = '{"step": 0}\n{"step": 4}\n{"step": 8}\n'
    assert (folder.path / "metrics.jsonl").read_text() == kept + '"no step"\n{"other": 1}\nbroken\n'
    assert (folder.path / "plan.jsonl").read_text() == kept
    assert (folder.path / "events.jsonl").read_text().count("\n") == 4  # what happened, happened
    folder.cut_after(-1)
    assert (folder.path / "plan.jsonl").read_text() == ""


def test_a_copy_of_the_model_gets_copies_of_the_optimizers_if_they_can_be_copied():
    model = torch.nn.Linear(2, 3)
    sgd = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    optimizers = [sgd, torch.optim.AdamW([model.bias], lr=0.2)]
    torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)  # which changes its step
    task = Task(model=model, optimizer=optimizers, data=[1])
    assert task.make_optimizers(model) == optimizers
    other, weights = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    copies = task.make_optimizers(other)
    assert [*map(type, copies)] == [torch.optim.SGD, torch.optim.AdamW]
    other(torch.ones(1, 2)).sum().backward()
    for optimizer in copies:
        optimizer.step()
    assert not any(optimizer.state for optimizer in optimizers)
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)
        assert not torch.equal(other.state_dict()[name], value)
    model = torch.nn.Linear(2, 3)
    original = Own(model.parameters(), [1])
    (copied,) = Task(model=model, optimizer=original, data=[1]).make_optimizers(
        copy.deepcopy(model)
    )
    assert copied.attribute == [1]
    assert copied.attribute is not original.attribute
    assert copied.itself is copied
    task = Task(model=model, optimizer=Own(model.parameters(), threading.Lock()), data=[1])
    with pytest.raises(UserError, match="give a function that makes it instead, Task"):
        task.make_optimizers(copy.deepcopy(model))


class Own(torch.optim.SGD):
    """An optimizer with attributes of its own, which torch does not copy."""

    def __init__(self, parameters, attribute):
        super().__init__(parameters, lr=0.1)
        self.attribute, self.itself = attribute, self


THEN = TrainConfig(timeline=True, model="cnn", run_dir="run", resume="auto")
NAMES = {field.name for field in fields(TrainConfig)}
OTHER = {
    **{"task": "a:b", "optimizer": "adamw", "model": "resnet18", "dataset": "mnist"},
    **{"val_split": 0.5, "seed": 1, "config": "run.toml", "init": "other.pt", "data_dir": "moved"},
    **{"quiet": True, "resume": "run/checkpoints/step-00000001.pt", "run_dir": "other"},
    **{"snapshots": "name", "lr": 0.2, "epochs": 20, "set": {"lr": 0.1}, "keep_all": True},
    **{"global_batch_size": 128, "precision": "bf16", "allreduce": "flat"},
}


def compare(**changes):
    return compare_flags(asdict(THEN), TrainConfig(**asdict(THEN) | changes))


def test_the_documented_table_has_every_flag():
    assert REJECTED | SILENT | set(INVALIDATES) <= NAMES
    assert not REJECTED & SILENT
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    table = text.partition("| flags | effect |")[2].partition("\n\n")[0]
    for name in NAMES:
        meaning = "applies from the resumed step on"
        if name in REJECTED | SILENT:
            meaning = "rejected" if name in REJECTED else "taken from the new command"
        (row,) = [row for row in table.splitlines()[2:] if f"`{flag_name(name)}`" in row]
        assert row.split(" | ")[1].startswith(meaning), name


def test_a_changed_flag_invalidates_its_part():
    plan = {Invalidated.EXCLUSION, Invalidated.PLAN}
    assert compare(precision="bf16")[1] == {Invalidated.COSTS, *plan}
    assert compare(global_batch_size=128)[1] == plan
    assert compare(allreduce="flat")[1] == {Invalidated.ALLREDUCE, Invalidated.EXCLUSION}
    assert compare() == compare_flags({"model": "cnn"}, THEN) == ([], set())  # of an older version


@pytest.mark.parametrize("name", OTHER)
def test_a_changed_flag_is_rejected_silent_or_applies_with_a_line(name):
    value, before, flag = OTHER[name], getattr(THEN, name), "--" + name.replace("_", "-")
    if name in REJECTED:
        with pytest.raises(AgreedError, match="give the same, or another --run-dir") as error:
            compare(**{name: value}, lr=0.5)
        made = f"{flag} is {value!r}, but the checkpoint was made with {before!r}"
        assert str(error.value).startswith(made)
        return
    lines, invalidated = compare(**{name: value})
    assert lines == ([] if name in SILENT else [f"{flag} changed from {before!r} to {value!r}"])
    assert invalidated == INVALIDATES.get(name, set())


def test_a_run_is_over_when_nothing_is_left():
    for done, flags, over in (
        ({"epoch": 3}, {"epochs": 3}, True),
        ({"epoch": 3}, {"epochs": 2}, True),
        ({"epoch": 3}, {"epochs": 4}, False),
        ({"epoch": 3, "is_done": False}, {"epochs": 3}, False),
        ({"epoch": 1, "step": 9}, {"epochs": 3, "max_steps": 9}, True),
        ({"epoch": 1, "step": 9}, {"epochs": 3, "max_steps": 10}, False),
        ({"epoch": 1, "step": 9}, {"epochs": 3}, False),
    ):
        progress = asdict(Progress(0, **{"is_done": True} | done))
        assert is_over(TrainConfig(**flags), progress) is over


def test_a_summary_is_read_as_written():
    summary = Summary(
        finished=True, steps=10, groups={"cpu": [0, 1]}, val_loss=0.5, failures=[], emulated=False
    )
    content = summary.to_json()
    assert content == {name: value for name, value in vars(summary).items() if value is not None}
    assert Summary.from_json(content) == summary
    odd = {"finished": 1, "steps": True, "ranks": {}, "val_loss": 2, "of a later version": 3}
    assert Summary.from_json(odd) == Summary(val_loss=2)


def test_a_ranks_place_has_its_host_and_device_and_not_its_world_rank():
    info = RankInfo(1, 1, "a", "gpu", "cuda:1", "a GPU", 2**30, "2.8")
    assert info.place == replace(info, world_rank=6).place == "a/1/gpu/cuda:1"
    for other in ({"local_rank": 0}, {"host": "b"}, {"kind": "mlu"}, {"device": "cpu"}):
        assert replace(info, **other).place != info.place


def test_an_evaluation_that_fails_leaves_the_model_as_it_was():
    """After the loss of a rank, its batch norms would be left as they are."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())

    def lost():
        yield from ()
        raise RuntimeError("a rank is lost")

    task = SimpleNamespace(model=model, metrics=None)
    with pytest.raises(RuntimeError):
        evaluate(task, None, lost())
    assert [module.training for module in model.modules()] == [True, True, False]
