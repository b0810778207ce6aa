"""Resumed runs, each a complete training on the ranks of the session."""

import errno
import json
import math
import os
import secrets
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from jobs import read_lines, read_readings
from samples import Points
from torch import nn

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.folders import request_restart, withdraw_request
from kaitian_mpi.recipes.image_classification import Schedule, make_task
from kaitian_mpi.runtime import signals
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.train.checkpoint.files import CheckpointFiles, snapshot_files
from kaitian_mpi.train.checkpoint.resume import find_checkpoint
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
from kaitian_mpi.train.measure.plan import Profile, find_profiles
from kaitian_mpi.train.saving import Saving
from kaitian_mpi.train.setup import prepare_without_folder
from kaitian_mpi.train.task import JointTask
from kaitian_mpi.train.training import Training

pytestmark = pytest.mark.sizes(3)

LENGTH, BATCH = 60, 12
STEPS = LENGTH // BATCH


class Some(Points):
    """A few data points; the environment can set their number."""

    num_classes = 4

    def __len__(self):
        return int(os.environ.get("POINTS", LENGTH))

    def __getitem__(self, index):
        inputs, label = super().__getitem__([index])
        return inputs[0], int(label[0])


def points():
    return Some(), Some()


def small(num_classes):
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_classes)).double()


@pytest.fixture(autouse=True)
def every_checkpoint_is_written(monkeypatch):
    # A slow disk skips some checkpoints, which the tests that cut a run back need.
    submit = BackgroundWriter.submit

    def submit_and_wait(writer, *args):
        submit(writer, *args)
        writer.wait()

    monkeypatch.setattr(BackgroundWriter, "submit", submit_and_wait)


@pytest.fixture
def folder(shared_path):
    return shared_path / "run"


@pytest.fixture
def name(world):
    """A name for snapshots."""
    return gather_values(world.comm, secrets.token_hex(8))[0]


USUAL = {
    "model": "test_resume:small",
    "dataset": "test_resume:points",
    "balance": "off",
    "parity": False,
    "allreduce": "flat",  # the fastest may differ between runs, and with it the last bits
    "global_batch_size": BATCH,
    "epochs": 2,
    "log_interval": 0.0,
    "keep_checkpoints": 99,
}


def run(world, folder, **flags):
    """Train, resuming if there is a checkpoint; return the summary."""
    config = TrainConfig(**USUAL | {"run_dir": str(folder), "resume": "auto"} | flags)
    with Training(JointTask(partial(make_task, config)), config) as training:
        for _ in training:
            pass
        summary = training.summary
    world.comm.Barrier()  # rank 0 writes the last file when the others have left
    return summary.to_json()


def on_rank_0(world, act):
    """Let one rank change files that the others neither read nor write meanwhile."""
    world.comm.Barrier()
    if world.rank == 0:
        act()
    world.comm.Barrier()


def cut_back(world, folder, step):
    """Restore a run as if killed after a step, with metrics of later steps."""

    def remove():
        for path in folder.glob("checkpoints/step-*"):
            if int(path.name[5:13]) > step:
                path.unlink()

    on_rank_0(world, remove)


def steps_in(folder):
    return [line["step"] for line in read_readings(folder)]


def summary_in(folder):
    return json.loads((folder / "summary.json").read_text())


def end_of(folder):
    """Return whether a run is finished, its epochs and its steps."""
    summary = summary_in(folder)
    return summary["finished"], summary["epochs"], summary["steps"]


def newest(folder):
    return torch.load(max(folder.glob("checkpoints/step-*.pt")), weights_only=True)


def weights_in(folder):
    state = torch.load(folder / "checkpoints" / "model.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


def test_a_rank_lost_before_the_first_step_needs_no_run_folder(world, capfd):
    """The survivors then look for a checkpoint, since the lost rank may have held it."""
    config = TrainConfig(model="cnn")
    assert find_checkpoint(config, world, None, "auto").metadata is None
    said = "no checkpoint without a run folder: starting from scratch"
    assert (said in capfd.readouterr().out) == (world.rank == 0)


def contents(world, folder):
    world.comm.Barrier()  # rank 0 has closed the folder
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    world.comm.Barrier()
    return found


@pytest.mark.thorough
def test_a_finished_run_is_unchanged_or_trains_more_epochs(world, folder, capsys):
    first = run(world, folder)
    before = contents(world, folder)
    if world.rank == 0:
        os.utime(folder / "summary.json", (1, 1))
    capsys.readouterr()
    assert run(world, folder, lr=0.3).keys() == first.keys()
    assert contents(world, folder) == before
    assert (folder / "summary.json").stat().st_mtime > 1  # it was written again
    if world.rank == 0:
        out = capsys.readouterr().out
        assert f"{folder} is finished (2 epochs, {2 * STEPS} steps): nothing left to train" in out
    # Missing results are there again after an evaluation.
    expected, exported = summary_in(folder), folder / "checkpoints" / "model.pt"
    on_rank_0(world, lambda: [path.unlink() for path in (folder / "summary.json", exported)])
    run(world, folder)
    for key in ("finished", "epochs", "steps", "val_loss", "val_accuracy"):
        assert summary_in(folder)[key] == expected[key]
    assert exported.exists()
    run(world, folder, epochs=4)
    assert end_of(folder) == (True, 4, 4 * STEPS)
    assert math.isfinite(summary_in(folder)["val_loss"])
    assert steps_in(folder) == list(range(1, 4 * STEPS + 1))


@pytest.mark.thorough
@pytest.mark.parametrize("other", [6, 20])
def test_another_global_batch_trains_all_epochs_and_keeps_the_schedule(world, folder, other):
    run(world, folder, epochs=3, checkpoint_every=1)
    cut_back(world, folder, step=7)  # in mid-epoch
    run(world, folder, epochs=3, global_batch_size=other)
    left = math.ceil((LENGTH - 2 * BATCH) / other) + math.ceil(LENGTH / other)
    assert end_of(folder) == (True, 3, 7 + left)
    assert summary_in(folder)["global_batch_size"] == other
    assert newest(folder)["progress"]["samples"] == 3 * LENGTH
    rate = Schedule(TrainConfig(), None).rate
    samples = 0
    for line in read_readings(folder):
        epoch_left = LENGTH - samples % LENGTH
        of_step = min(epoch_left, BATCH if line["step"] <= 7 else other)
        middle = (samples + of_step / 2) / (3 * LENGTH)
        assert line["learning_rate"] == pytest.approx(rate(middle))
        samples += of_step
    assert samples == 3 * LENGTH


def test_changed_flags_apply(world, folder, capsys):
    run(world, folder, checkpoint_every=1)
    cut_back(world, folder, step=3)
    capsys.readouterr()
    changed = {"momentum": 0.3, "weight_decay": 0.2, "precision": "bf16", "micro_batch_size": 1}
    run(world, folder, **changed, nesterov=False, allreduce="flat")
    if world.rank == 0:
        out = capsys.readouterr().out
        for name, value in changed.items():
            assert f"--{name.replace('_', '-')} changed from " in out
            assert f" to {value!r}" in out
    content = newest(folder)
    group = content["optimizers"][0]["param_groups"][0]
    held = [group[name] for name in ("momentum", "weight_decay", "nesterov")]
    assert held == [0.3, 0.2, False]
    profiles = content["metadata"]["profiles"].values()
    assert {profile["precision"] for profile in profiles} == {"bf16"}
    assert content["metadata"]["allreduce_algorithm"] == ("flat" if world.size > 1 else "direct")


@pytest.mark.thorough
def test_balance_can_be_switched_on_and_off(world, folder, capsys):
    measured = {"balance": "static", "benchmark_seconds": 0.5, "keep_all": True}
    run(world, folder, max_steps=2)
    run(world, folder, max_steps=4, **measured)
    profiles = newest(folder)["metadata"]["profiles"].values()
    assert all(profile["cost"] for profile in profiles)
    capsys.readouterr()
    run(world, folder, max_steps=6, **measured | {"benchmark_seconds": 0.6})
    if world.rank == 0:
        assert "--benchmark-seconds changed from 0.5 to 0.6" in capsys.readouterr().out
    run(world, folder)
    sizes = newest(folder)["metadata"]["batch_sizes"]
    assert sum(sizes) == BATCH
    assert max(sizes) - min(sizes) <= 1
    assert summary_in(folder)["steps"] == 2 * STEPS


def test_all_ranks_are_benchmarked_where_one_is_not_known(world):
    config = TrainConfig(**USUAL | {"balance": "static", "benchmark_seconds": 0.2})
    setup = prepare_without_folder(partial(make_task, config), config, world)
    infos = tuple(replace(info, host=f"host{info.world_rank}") for info in world.infos)
    hosts = replace(world, infos=infos)
    cost = RankCost(1.0, 2.0)
    places = infos[0].place, infos[2].place, "gone/0/cpu/cpu"
    known = dict.fromkeys(places, Profile(cost, "contiguous", "fp32"))
    profiles = find_profiles(config, hosts, setup, known)
    assert cost not in profiles.costs(infos)
    assert len(set(gather_values(world.comm, str(profiles.by_place)))) == 1
    known[infos[1].place] = known[infos[0].place]
    assert find_profiles(config, hosts, setup, known).costs(infos) == [cost] * 3


@pytest.fixture
def asked_to_restart(world, folder, monkeypatch):
    def ask():
        folder.mkdir()
        request_restart(folder, "id")

    monkeypatch.setenv(SUPERVISED, "id")
    on_rank_0(world, ask)


@pytest.mark.usefixtures("asked_to_restart")
def test_a_job_that_is_asked_to_saves_and_ends_and_goes_on_exactly(world, folder, name):
    undisturbed = folder.with_name("undisturbed")
    run(world, undisturbed)
    assert not run(world, folder, snapshots=name)["finished"]
    assert not withdraw_request(folder)
    saved = newest(folder)["progress"]["step"]
    assert saved in (2, 3)
    in_memory = snapshot_files(name)
    assert in_memory.steps() == [saved]
    on_rank_0(world, lambda: shutil.rmtree(folder / "checkpoints"))
    assert run(world, folder, snapshots=name)["finished"]
    assert weights_in(folder).equal(weights_in(undisturbed))
    assert steps_in(folder) == list(range(1, 2 * STEPS + 1))


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("replicate", "shard")),
    ],
)
def test_a_signal_to_end_saves_first_whatever_the_layout(world, folder, layout, capsys):
    config = TrainConfig(**USUAL | {"run_dir": str(folder), "layout": layout})
    with Training(JointTask(partial(make_task, config)), config) as training:
        for step in training:
            if step.number == 3 and world.rank == 1:
                for callback in signals._requests:
                    callback(True)  # as at SIGUSR2
        assert training.steps_done in (4, 5)
        assert not training.summary.finished
    done = steps_in(folder)[-1]
    assert newest(folder)["progress"]["step"] == done
    said = f"step {done} is saved, and the job ends: --resume auto resumes from it"
    assert capsys.readouterr().out.count(said) == (world.rank == 0)
    assert run(world, folder, layout=layout)["finished"]
    assert steps_in(folder) == list(range(1, 2 * STEPS + 1))


@pytest.mark.usefixtures("asked_to_restart")
def test_a_job_that_cannot_save_goes_on_where_it_is_asked_to_end(
    world, folder, name, monkeypatch, capsys
):
    save = Saving.save_to_end

    def fail(*args):
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFiles, "write", cannot)
            return save(*args)

    def cannot(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Saving, "save_to_end", fail)
    assert run(world, folder, snapshots=name)["finished"]
    assert steps_in(folder) == list(range(1, 2 * STEPS + 1))
    refused = "could not be saved, so the job does not end"
    assert capsys.readouterr().out.count(refused) == (world.rank == 0)


def test_a_file_is_resumed_in_a_new_folder_and_leaves_its_own_as_it_is(world, folder):
    run(world, folder, checkpoint_every=2)
    before = contents(world, folder)
    fourth, new = folder / "checkpoints" / "step-00000004.pt", folder.with_name("new")
    with pytest.raises(AgreedError, match=r"run has other checkpoints; name a new --run-dir"):
        run(world, folder, resume=str(fourth))
    run(world, new, resume=str(fourth), lr=1e-5, max_steps=6)
    assert steps_in(new) == [5, 6]
    run(world, new, resume=str(max(new.glob("checkpoints/step-*.pt"))), lr=1e-5)
    assert steps_in(new) == [*range(5, 2 * STEPS + 1)]
    assert (weights_in(folder) - weights_in(new)).abs().max() > 1e-4
    assert contents(world, folder) == before
    assert (new / "checkpoints" / "step-00000004.pt").exists()


def test_what_does_not_fit_or_cannot_be_read_is_refused(world, folder, monkeypatch):
    """Unreadable checkpoints do not lead to a fresh start."""

    def check_refused(message, **flags):
        before = contents(world, folder)
        with pytest.raises(AgreedError, match=message) as caught:
            run(world, folder, **flags)
        assert "\n" not in str(caught.value)
        assert contents(world, folder) == before

    def damage():
        for path in folder.glob("checkpoints/step-*.pt"):
            path.write_bytes(b"not what it was")

    run(world, folder, max_steps=3, checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setenv("POINTS", "40")
        check_refused(r"the dataset has 40 \+ 40 .* was made with 60 \+ 60 ")
    check_refused("--seed is 3, but", seed=3)
    on_rank_0(world, damage)
    check_refused(rf"none of the 3 checkpoints in {folder}/checkpoints is intact; restore")


@pytest.mark.thorough
def test_a_large_state_is_saved_and_resumed_without_a_copy(world, folder, name, monkeypatch):
    copies = []
    monkeypatch.setattr(BackgroundWriter, "submit", lambda *args: copies.append(args))
    large = {"checkpoint_copy_mb": 0, "checkpoint_every": 2, "snapshots": name}
    reference = folder.with_name("reference")
    run(world, reference, **large)
    run(world, folder, **large)
    cut_back(world, folder, step=4)
    run(world, folder, **large)
    assert not copies
    assert steps_in(folder) == list(range(1, 2 * STEPS + 1))
    assert torch.equal(weights_in(folder), weights_in(reference))


@pytest.mark.thorough
def test_no_step_appears_twice_in_the_metrics(world, folder):
    run(world, folder, checkpoint_every=2)
    for step, plans in ((4, [0, 4]), (0, [0])):  # the latter from scratch
        cut_back(world, folder, step)
        run(world, folder, checkpoint_every=2)
        assert steps_in(folder) == list(range(1, 2 * STEPS + 1))
        assert [plan["step"] for plan in read_lines(folder / "plan.jsonl")] == plans
