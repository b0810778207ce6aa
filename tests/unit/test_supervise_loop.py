"""When a supervised job is restarted and when not: the loop with fakes for all effects."""

import json
import os
import signal
from dataclasses import dataclass, replace

import pytest
from supervised import FakeRunner

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.hosts import parse_host_list
from kaitian_mpi.supervise.mpirun_command import parse_command
from kaitian_mpi.supervise.starts import JobCommand
from kaitian_mpi.supervise.supervisor import read_state


@dataclass
class Run:
    """One run of mpirun: how it ends, what it leaves, and which hosts are lost."""

    code: int = 1
    seconds: int = 60
    step: int = 0
    resumed: int | None = None
    finished: bool = False
    lost: str = ""
    signal: int = 0


class World(FakeRunner):
    """Plays the planned runs and records the calls."""

    def __init__(self, folder, *runs):
        super().__init__(folder)
        self.runs = list(runs)
        self.commands, self.probed = [], []

    def run(self, words):
        self.commands.append(words)
        last = self.runs.pop(0)
        self.clock += last.seconds
        self.stopped, self.silent = last.signal, set(last.lost)
        if last.step or last.finished:
            self.write_results(last.step, last.finished, last.resumed)
        return last.code

    def lost_hosts(self, hosts):
        self.probed.append([host.name for host in hosts])
        return super().lost_hosts(hosts)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def make_job(folder, hosts="a:2,b,c", flags=""):
    options = f"--host {hosts} -np 4" if hosts else "-np 4"
    return JobCommand(
        command=parse_command(f"mpirun {options} kaitian-train {flags}".split()),
        hosts=parse_host_list(hosts) if hosts else (),
        local=frozenset("a"),
        hostfiles={},
        config=TrainConfig(run_dir=str(folder), snapshots="beef"),
        folder=folder,
    )


def outcome(folder, *runs, hosts="a:2,b,c", max_restarts=3):
    world = World(folder, *runs)
    code = world.supervise(make_job(folder, hosts), max_restarts)
    assert world.runs == []
    return code, world


def hosts_of(world):
    return [words[words.index("--host") + 1] for words in world.commands]


def test_a_finished_run_is_started_as_the_command_may_ask_for_more(tmp_path):
    for number, (runs, code) in enumerate((
        ([Run(0, step=10, finished=True)], 0),  # it says so again
        ([Run(0, seconds=20), Run(1, step=15), Run(0, step=20, finished=True)], 0),  # more epochs
        *(([Run(2, seconds=20)], 2), ([Run(1, step=15), Run(2, seconds=20)], 2)),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 10}\n')
        (folder / "summary.json").write_text('{"steps": 10, "finished": true}')
        os.utime(folder / "summary.json", (1, 1))
        found, world = outcome(folder, *runs)
        assert found == code
        assert ("finished after" in world.reports[-1]) == (code == 0)


def test_a_lost_host_is_excluded_until_it_returns(folder):
    runs = Run(0, step=5, lost="b"), Run(1, step=8, lost="bc"), Run(1, step=12)
    code, world = outcome(folder, *runs, Run(0, step=20, finished=True))
    assert code == 0
    assert hosts_of(world) == ["a:2,b,c", "a:2,c", "a:2", "a:2,b,c"]
    assert [words[words.index("-np") + 1] for words in world.commands] == ["4", "3", "2", "4"]
    assert world.probed == [["b", "c"]] * 3  # a is this machine
    assert world.pauses == []
    told = [line for line in world.reports if line.startswith(("start", "host"))]
    b_lost, c_lost = ("host b does not answer", "host c does not answer")
    assert told == [
        *("start 1 of 4: 4 ranks on a, b, c", b_lost, "start 2 of 4: 3 ranks on a, c", b_lost),
        *(c_lost, "start 3 of 4: 2 ranks on a", "start 4 of 4: 4 ranks on a, b, c"),
    ]


def test_a_full_disk_does_not_cause_a_restart(folder):
    world = World(folder, Run(74, step=5), Run(74, step=9))
    world.disk_is_full = True
    assert (world.supervise(make_job(folder)), len(world.commands)) == (74, 1)
    assert world.reports[1:] == [
        "not started again: the job could not write its results, see above",
        "the newest state is still in memory (/dev/shm), as the disk is full; correct that, and "
        f"run the same command with --run-dir {folder} --resume auto --snapshots beef",
    ]
    assert world.removed == []


def test_snapshots_are_removed_from_memory(tmp_path):
    others = ["b", "c"]
    for number, (runs, removed) in enumerate((
        ([FINISHED], []),
        ([Run(1, step=3, lost="c"), FINISHED], ["c"]),
        *(([Run(1, step=3, signal=number)], others) for number in (signal.SIGTERM, signal.SIGINT)),
        ([Run(1, step=n) for n in range(4)], others),  # given up
        ([Run(2, seconds=1)], others),  # a mistake
        ([Run(74, step=3)], others),  # saved after all
    )):  # fmt: skip
        finished = runs[-1].finished
        _, world = outcome(tmp_path / str(number), *runs)
        assert (world.saves, world.removed) == ([] if finished else [True], [removed])


def test_snapshots_are_removed_if_a_command_cannot_be_started_but_not_those_of_the_user(tmp_path):
    (tmp_path / "file").touch()
    command = parse_command("mpirun --hostfile hf kaitian-train".split())
    job = replace(make_job(tmp_path / "file/run"), command=command, hostfiles={"hf": "a\nb\nc\n"})
    world = World(tmp_path / "other", Run(lost="b"))
    with pytest.raises(UserError, match=r"hostfile-start-2: .*; name a --run-dir that can be"):
        world.supervise(job)
    assert world.removed == [["b", "c"]]
    job = make_job(tmp_path / "run", flags="--snapshots beef")
    world = World(tmp_path / "run", Run(1, step=3, signal=signal.SIGTERM))
    assert world.supervise(job) == 128 + signal.SIGTERM
    assert (world.saves, world.removed) == ([], [])


FINISHED = Run(0, step=9, finished=True)
GAVE_UP = (
    "gave up after {}; mpirun's last exit code was {}; see the errors above, then run the same "
    "command with --run-dir FOLDER --resume auto"
)
QUICKLY = "2 starts (the last two failed immediately, on the same hosts)"


@pytest.mark.parametrize(
    ("runs", "code", "end"),
    [
        ([Run(2, step=5), FINISHED], 0, "finished after 2 starts"),  # 2 is no mistake in a flag
        ([replace(FINISHED, signal=signal.SIGTERM)], 0, "finished after 1 start"),
        ([Run(9, seconds=1), Run(9, seconds=4)], 9, GAVE_UP.format(QUICKLY, 9)),
        ([Run(seconds=1), Run(seconds=6), FINISHED], 0, "finished after 3 starts"),
        ([Run(seconds=1), Run(seconds=1, step=7), FINISHED], 0, "finished after 3 starts"),
        ([Run(seconds=1, lost="b"), Run(seconds=1), FINISHED], 0, "finished after 3 starts"),
        *(
            ([Run(step=1), Run(step=2), Run(step=3), Run(last, step=4)], code, end)
            for last, code in ((7, 7), (0, 1), (137, 137), (2, 2))
            for end in [GAVE_UP.format("4 starts (--max-restarts)", last)]
        ),
    ],
)
def test_a_job_is_started_again_until_it_has_finished_or_does_not_help(folder, runs, code, end):
    found, world = outcome(folder, *runs)
    assert (found, world.reports[-1]) == (code, end.replace("FOLDER", str(folder)))


def test_the_advice_to_continue_a_script_names_no_flag_that_it_does_not_have(folder):
    command = parse_command("mpirun -np 4 kaitian-run train.py".split())
    job = replace(make_job(folder, hosts=""), command=command)
    world = World(folder, Run(9, step=5))
    assert world.supervise(job, max_restarts=0) == 9
    assert world.reports[-1].endswith("see the errors above, then run the same command again")


def test_steps_that_are_trained_again_are_progress(folder):
    """Their earlier lines in metrics.jsonl are removed, so that the file becomes shorter."""
    runs = [Run(step=step) for step in (40, 80, 100)]
    runs += [Run(seconds=1, step=50, resumed=40), Run(seconds=1, step=50, resumed=40), FINISHED]
    code, world = outcome(folder, *runs, max_restarts=6)
    assert (code, world.reports[-1]) == (0, "finished after 6 starts")


def test_what_was_trained_is_read_from_the_last_whole_line(folder):
    folder.mkdir()
    line = json.dumps({"step": 7, "time": 5.5, "batch_sizes": [1] * 1000}) + "\n"
    for text, expected in (
        (line, (7, 5.5)),
        (line * 900 + line[:-2], (7, 5.5)),
        ("", (0, 0.0)),
        ("damaged\n", (0, 0.0)),
        ("[]\n", (0, 0.0)),
    ):
        (folder / "metrics.jsonl").write_text(text)
        state = read_state(folder)
        assert (state.last_step, state.measured_at) == expected


def test_only_consecutive_starts_without_progress_are_delayed(folder):
    runs = [Run(), Run(), Run(), Run(step=3), Run(), Run(), Run(step=4, finished=True)]
    _, world = outcome(folder, *runs, max_restarts=6)
    assert world.pauses == [5.0, 5.0, 5.0]  # before the third, fourth and seventh


@pytest.mark.parametrize("moment", ["lost_hosts", "pause"])
def test_a_signal_between_two_starts_ends_the_loop(folder, moment):
    world = World(folder, Run(), Run(seconds=60))

    def stop(*_):
        if len(world.commands) == 2:
            world.stopped = signal.SIGTERM
        return frozenset()

    setattr(world, moment, stop)
    assert world.supervise(make_job(folder)) == 128 + signal.SIGTERM
    assert len(world.commands) == 2


@pytest.mark.parametrize(
    ("run", "saved", "code"),
    [(Run(0, step=5), True, 0), (Run(0, step=5), False, 1), (Run(9), False, 9)],
    ids=["saved", "not saved", "failed"],
)
def test_sigusr2_ends_a_job_with_what_it_has_saved(folder, run, saved, code):
    world = World(folder, replace(run, signal=signal.SIGUSR2))
    world.has_saved = saved
    assert (world.supervise(make_job(folder)), world.runs) == (code, [])
    assert world.reports[-1] == "ended by SIGUSR2; not started again"
    assert (world.saves, world.removed) == ([True], [["b", "c"]])


def test_a_users_checkpoint_is_resumed_in_a_folder_that_holds_a_run(folder):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 90}\n')
    command = parse_command("mpirun -np 4 kaitian-train --resume x.pt".split())
    job = replace(make_job(folder, hosts=""), command=command)
    world = World(folder, Run(1), Run(1, step=5), FINISHED)
    assert world.supervise(job) == 0
    assert ["--resume=auto" in words for words in world.commands] == [False, False, True]
