"""The parts of training that need no other ranks."""

import copy
import threading

import pytest
import torch

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.console import table_lines
from kaitian_mpi.observe.run_folder import open_run_folder
from kaitian_mpi.recipes.image_classification import Schedule, make_optimizer
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.train.step import StepClock
from kaitian_mpi.train.task import Task


def test_learning_rate():
    for schedule, progress, expected in (
        *(("cosine", 0.125, 0.5), ("cosine", 0.25, 1.0), ("cosine", 0.625, 0.5)),
        *(("cosine", 1.0, 0.0), ("constant", 0.125, 0.5), ("constant", 0.9, 1.0)),
    ):
        rate = Schedule(TrainConfig(lr=1.0, warmup=0.25, schedule=schedule), None).rate
        assert rate(progress) == pytest.approx(expected)
    assert Schedule(TrainConfig(lr=2.0, warmup=0.0), None).rate(0.0) == pytest.approx(2.0)


def test_the_optimizer_is_the_one_asked_for_and_decays_no_biases_and_norms():
    config = parse_config("kaitian-train", ["--optimizer", "adamw", "--lr", "0.01"])
    optimizer = make_optimizer(config, build_model("cnn", 10))
    assert type(optimizer) is torch.optim.AdamW
    decayed, spared = optimizer.param_groups
    assert (decayed["lr"], decayed["weight_decay"]) == (0.01, 0.01)
    assert (spared["lr"], spared["weight_decay"]) == (0.01, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])
    assert type(make_optimizer(TrainConfig(), build_model("cnn", 10))) is torch.optim.SGD


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
    ],
)  # fmt: skip
def test_the_step_clock_tells_phases_from_waiting(monkeypatch, parts, expected):
    at, device = 0.0, CpuDevice()
    monkeypatch.setattr("time.perf_counter", lambda: at)
    clock = StepClock(device)
    assert clock.enter(WAIT) == ""  # a script calls the model before the first step
    for _ in range(2):
        ready, phase = None, FORWARD
        clock.start()
        for part in parts:
            if isinstance(part, float):
                at += part
            elif part == BUCKET:
                ready = device.mark()
            elif part == SUMMED:
                clock.gradients_summed(ready)
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


def test_only_rank_0_writes_and_it_writes_complete_files(tmp_path):
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


def test_lines_of_repeated_steps_are_removed(tmp_path):
    folder = open_run_folder(TrainConfig(run_dir=str(tmp_path / "run")), rank=0)
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


def test_a_copy_of_the_model_gets_copies_of_the_optimizers_that_were_given():
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
    for each in copies:
        each.step()
    assert not any(each.state for each in optimizers)
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)
        assert not torch.equal(other.state_dict()[name], value)


class Own(torch.optim.SGD):
    """An optimizer with attributes of its own, which torch does not copy."""

    def __init__(self, parameters, attribute):
        super().__init__(parameters, lr=0.1)
        self.attribute, self.itself = attribute, self


def test_a_copied_optimizer_has_its_own_attributes_or_cannot_be_copied():
    model = torch.nn.Linear(2, 3)
    given = Own(model.parameters(), [1])
    (found,) = Task(model=model, optimizer=given, data=[1]).make_optimizers(copy.deepcopy(model))
    assert found.attribute == [1]
    assert found.attribute is not given.attribute
    assert found.itself is found
    task = Task(model=model, optimizer=Own(model.parameters(), threading.Lock()), data=[1])
    with pytest.raises(UserError, match="give a function that makes it instead, Task"):
        task.make_optimizers(copy.deepcopy(model))
