"""`kaitian-supervise` as a process, with a small script in place of mpirun."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from choices import by_default

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.supervise import mpirun_process
from kaitian_mpi.supervise.hosts import Host, parse_host_list
from kaitian_mpi.supervise.job_runner import JobRunner, environment
from kaitian_mpi.supervise.mpirun_command import parse_command
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand

LONGEST_SEC = 120
# Records its calls and arguments, then runs the test's script.
MPIRUN = """#!/bin/sh
call=$(($(cat calls 2>/dev/null || echo 0) + 1))
echo $call > calls
echo "$@" >> words
echo "$OMPI_KAITIAN_SNAPSHOTS" "$OMPI_KAITIAN_JOB" >> names
for word in "$@"; do
    case $word in --run-dir=*) folder=${word#--run-dir=} ;; esac
done
mkdir -p "$folder"
summary() { echo "{\\"steps\\": $1, \\"finished\\": $2}" > "$folder/summary.json"; }
"""
# In short pieces: a shell that is told to end may not know its newest child yet, and so not end it.
WAIT = "echo > ready; while :; do sleep 0.05; done"
AGENT = """#!/bin/sh
echo "$@" >> asked
case $1 in *198.51.100.3) exec sleep 60 ;; *198.51.100.4) exit 255 ;; *198.51.100.5) exit 0 ;; esac
[ "$2" != grep ]
"""


@pytest.fixture
def place(tmp_path):
    """An empty folder to start in, with an agent."""
    write_script(tmp_path / "agent", AGENT)
    return tmp_path


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)


def start(place, script, *words, options=(), preexec_fn=None):
    write_script(place / "mpirun", MPIRUN + script)
    command = [sys.executable, "-m", "kaitian_mpi.cli.supervise", *options, "./mpirun", *words]
    environ = {**os.environ, "PRTE_MCA_plm_ssh_agent": str(place / "agent")}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": preexec_fn}
    return subprocess.Popen(command, cwd=place, env=environ, text=True, **how)


def run(place, script, *words, options=()):
    process = start(place, script, *words, options=options)
    out, err = process.communicate(timeout=LONGEST_SEC)
    return process.returncode, out, err


def calls(place):
    return int((place / "calls").read_text())


def wait_for(path):
    assert wait_until(path.exists, LONGEST_SEC), f"no {path}"


def wait_for_job_of(supervisor, place):
    """Wait until a supervisor forwards signals to its job, whose script writes `known` at SIGUSR1.

    The script may be ready before the supervisor has its process.
    """
    wait_for(place / "ready")

    def is_known():
        supervisor.send_signal(signal.SIGUSR1)
        return (place / "known").exists()

    assert wait_until(is_known, LONGEST_SEC, 0.1, min_nap_sec=0.1)


def test_exit_code_0_without_a_finished_summary_is_restarted(place):
    """In the ranks' working directory, and without a terminal."""
    (place / "there").mkdir()
    script = """cat; [ $(cut -d' ' -f5 /proc/$$/stat) = $$ ] || exit 3
    cd there; mkdir -p "$folder"
    [ $((call % 3)) = 0 ] && summary 9 true || summary $call false; echo from $call"""
    words = "--wdir there -np 2 kaitian-train --run-dir".split()
    code, out, err = run(place, script, *words, "here")
    assert (code, calls(place)) == (0, 3)
    assert out == "from 1\nfrom 2\nfrom 3\n"
    assert "kaitian-supervise: start 3 of 4: 2 ranks\n" in err
    assert err.endswith("kaitian-supervise: finished after 3 starts\n")
    lines = (place / "words").read_text().splitlines()
    assert set(lines) == {f"{' '.join(words)} here --run-dir=here --resume=auto"}
    names = (place / "names").read_text().splitlines()
    assert (len(names), len(set(names))) == (3, 1)
    assert re.fullmatch("[0-9a-f]{32} [0-9a-f]{16}", names[0])  # by the environment
    assert json.loads((place / "there/here/summary.json").read_text())["steps"] == 9
    code, _, err = run(place, script, *words[:-1], "--run-dir=here")
    assert (code, calls(place)) == (0, 6)  # earlier summaries do not count
    assert err.endswith("kaitian-supervise: finished after 3 starts\n")


def test_a_lost_host_is_excluded_until_none_is_left(place):
    (place / "hf").write_text("localhost slots=2\n198.51.100.3 slots=1\n198.51.100.2 slots=1\n")
    script = """
    [ $call != 2 ] && { summary 5 false; exit 0; }
    cat "$2"; summary 9 true"""
    words = ["--hostfile", "hf", "-np", "4", "kaitian-train", "--emulate-kinds=a,b,c,d"]
    code, out, err = run(place, script, *words, options=["--probe-seconds", "0.5"])
    assert (code, calls(place)) == (0, 2)
    assert "kaitian-supervise: host 198.51.100.3 does not answer\n" in err
    assert "start 2 of 4: 3 ranks on localhost, 198.51.100.2" in err
    assert out == "localhost slots=2\n198.51.100.2 slots=1\n"
    name = (place / "names").read_text().split()[0]
    assert sorted((place / "asked").read_text().split("\n")) == [
        *("", "198.51.100.2 true"),
        f"198.51.100.3 rm -rf /dev/shm/kaitian-{name}-*",  # it was lost: it may have kept one
        "198.51.100.3 true",
    ]
    second = (place / "words").read_text().splitlines()[1]
    assert "/hostfile-start-2 -np 3 kaitian-train" in second
    assert "--emulate-kinds=a,b,c" in second
    # One that refuses connections is lost, too.
    code, _, err = run(place, script, *"--host 198.51.100.4 -np 1 kaitian-train".split())
    assert (code, calls(place)) == (1, 3)
    told = (
        "kaitian-supervise: not started again, as no host answers; check them by ssh, then run the "
        r"same command with --run-dir runs/\S+ --resume auto\nkaitian-supervise: /dev/shm/kaitian-"
    )
    assert re.search(rf"\n{told}\w{{32}}-\* may be left on 198.51.100.4\n$", err)


# Saves a rank's state, and outlives both the rank and mpirun.
SAVER = """
import sys, time
from pathlib import Path
from kaitian_mpi.observe.folder_lock import saving_in
with saving_in(Path(sys.argv[1])):
    Path("saving").touch()
    while not Path("may-end").exists():
        time.sleep(0.01)
    Path("saved").touch()
"""


@pytest.mark.linux("snapshots are in /dev/shm")
def test_after_a_stop_signal_it_waits_for_the_save_and_removes_snapshots(place):
    (place / "saver.py").write_text(SAVER)
    script = f"""snapshots=/dev/shm/kaitian-$OMPI_KAITIAN_SNAPSHOTS-$(hostname)
    mkdir -m 700 $snapshots; echo kept > $snapshots/file; ls $snapshots > kept
    mkdir -p run/checkpoints; setsid {sys.executable} saver.py run/checkpoints > /dev/null 2>&1 &
    trap 'echo got >> got; exit 7' INT; {WAIT}"""
    supervisor = start(place, script, "-np", "2", "kaitian-train", "--run-dir=run")
    try:
        wait_for(place / "saving")
        wait_for(place / "ready")
        supervisor.send_signal(signal.SIGINT)
        waiting = next((line for line in supervisor.stderr if "waiting for" in line), "")
        with pytest.raises(subprocess.TimeoutExpired):
            supervisor.wait(0.5)
    finally:
        (place / "may-end").touch()
    _, err = supervisor.communicate(timeout=LONGEST_SEC)
    assert (place / "saved").exists()
    assert re.fullmatch(
        rf"kaitian-supervise: waiting for process \d+ on {re.escape(socket.gethostname())}, which "
        "is still writing a checkpoint in run/checkpoints\n",
        waiting,
    )
    assert supervisor.returncode == 128 + signal.SIGINT, err
    assert ((place / "got").read_text(), calls(place)) == ("got\n", 1)
    assert err.endswith("kaitian-supervise: ended by SIGINT; not started again\n")
    assert (place / "kept").read_text() == "file\n"
    snapshots = (place / "names").read_text().split()[0]
    assert not list(Path("/dev/shm").glob(f"kaitian-{snapshots}-*"))


# Its last step took 2.5 s.
METRICS = '{"step": 1, "step_time_sec": 9}\n{"step": 2, "step_time_sec": 2.5}\n{"step": 2}\n'


def supervisor_that_waits(place, save_sec):
    """Start a supervisor of a job that has so many seconds, and 4 steps, to save."""
    program = f"""
import kaitian_mpi.cli.supervise, kaitian_mpi.supervise.job_runner as job_runner
job_runner._SAVE_SEC = {save_sec}
kaitian_mpi.cli.supervise.main()
"""
    words = "./mpirun -np 2 kaitian-train --layout shard --run-dir=run".split()
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["by itself", "in time", "at once"])
def test_ranks_that_have_parts_may_save_before_mpirun_gets_a_stop_signal(place, end):
    """Until 60 s and 4 steps are over, here 1 s in all, or a second signal comes."""
    asked = "[ -e run/restart-request ] && exit 0; " if end == "by itself" else ""
    script = f"""cat metrics > run/metrics.jsonl; trap 'echo > known' USR1
    trap 'echo got >> got; exit 7' TERM; {WAIT.replace("; do ", f"; do {asked}")}"""
    write_script(place / "mpirun", MPIRUN + script)
    (place / "metrics").write_text(METRICS)
    with supervisor_that_waits(place, save_sec=-9 if end == "in time" else 600) as supervisor:
        wait_for_job_of(supervisor, place)
        supervisor.terminate()
        line = next(line for line in supervisor.stderr if "asking" in line)
        if end == "at once":
            supervisor.terminate()
        _, err = supervisor.communicate(timeout=LONGEST_SEC)
    seconds = 1 if end == "in time" else 610
    assert line == (
        f"kaitian-supervise: asking the job to save and end, within {seconds} s or once it has "
        "written a checkpoint; a second signal ends it at once\n"
    )
    assert supervisor.returncode == 128 + signal.SIGTERM
    assert (place / "got").exists() is (end != "by itself")
    told = "the job has not saved in time; terminating it (the last checkpoint is kept)"
    assert (told in err) is (end == "in time")
    assert not (place / "run/restart-request").exists()


def test_mpirun_gets_no_stop_signal_while_a_checkpoint_is_written(place):
    (place / "saver.py").write_text(SAVER)
    script = f"""cat metrics > run/metrics.jsonl; mkdir -p run/checkpoints
    {sys.executable} saver.py run/checkpoints > /dev/null 2>&1 &
    trap 'echo got >> got; exit 7' TERM; {WAIT.replace("do ", "do [ -e saved ] && exit 0; ")}"""
    (place / "metrics").write_text(METRICS)
    write_script(place / "mpirun", MPIRUN + script)
    with supervisor_that_waits(place, save_sec=-9.5) as supervisor:
        try:
            wait_for(place / "saving")
            wait_for(place / "ready")
            supervisor.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                supervisor.wait(2)
        finally:
            (place / "may-end").touch()
        _, err = supervisor.communicate(timeout=LONGEST_SEC)
    assert supervisor.returncode == 128 + signal.SIGTERM, err
    assert not (place / "got").exists()
    assert err.count("the job is saving a checkpoint; a second signal ends it at once") == 1


# Collects a state for some seconds, or hangs after the first piece, and then saves it.
COLLECTOR = """
import sys, time
from pathlib import Path
from kaitian_mpi.observe.folder_lock import collecting_in
with collecting_in(Path("run/checkpoints")) as on_piece:
    on_piece()
    Path("collecting").touch()
    until = time.monotonic() + 6
    while sys.argv[1] == "hangs" or time.monotonic() < until:
        time.sleep(0.1)
        sys.argv[1] == "hangs" or on_piece()
    Path("saved").touch()
    time.sleep(0.5)
"""


@pytest.mark.parametrize("collection", ["advances", "hangs"])
def test_mpirun_gets_no_stop_signal_while_a_state_is_collected_unless_that_hangs(place, collection):
    (place / "collector.py").write_text(COLLECTOR)
    script = f"""cat metrics > run/metrics.jsonl; mkdir -p run/checkpoints
    {sys.executable} collector.py {collection} > /dev/null 2>&1 & collector=$!
    trap 'echo got >> got; kill $collector; exit 7' TERM
    {WAIT.replace("do ", "do [ -e saved ] && exit 0; ")}"""
    (place / "metrics").write_text(METRICS)
    write_script(place / "mpirun", MPIRUN + script)
    with supervisor_that_waits(place, save_sec=-8) as supervisor:
        wait_for(place / "collecting")
        wait_for(place / "ready")
        supervisor.terminate()
        _, err = supervisor.communicate(timeout=LONGEST_SEC)
    assert supervisor.returncode == 128 + signal.SIGTERM, err
    assert err.count("the job is saving a checkpoint; a second signal ends it at once") == 1
    hangs = collection == "hangs"
    assert ((place / "got").exists(), (place / "saved").exists()) == (hangs, not hangs), err
    assert ("the job has not saved in time" in err) is hangs


def test_sigusr1_is_forwarded_and_ends_nothing(place):
    script, got = "trap 'echo > got; summary 1 true; exit 0' USR1; " + WAIT, place / "got"
    process = start(place, script, "-np", "2", "kaitian-train")
    wait_for(place / "ready")
    for _ in range(5):  # one that comes while mpirun is still being started is not forwarded
        if not got.exists():
            process.send_signal(signal.SIGUSR1)
            wait_until(got.exists, 5)
    process.communicate(timeout=LONGEST_SEC)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("program", "end", "code"),
    [
        ("kaitian-train", "rm run/restart-request; exit 0", 0),
        ("kaitian-train", "exit 0", 1),  # it has not saved
        ("kaitian-train", "summary 9 true; exit 0", 0),
        ("kaitian-run", "exit 5", 5),
    ],
    ids=["saves", "fails", "finishes", "a script"],
)
def test_sigusr2_has_the_job_save_and_end_and_it_is_not_started_again(place, program, end, code):
    words = ["--run-dir=run"] if program == "kaitian-train" else ["x.py"]
    asked = f"[ -e run/restart-request ] && {{ {end}; }}"
    script = f"trap '{end}' USR2; {WAIT}"
    if program == "kaitian-train":
        script = f"trap 'exit 9' USR2; {WAIT.replace('do ', f'do {asked}; ')}"
    process = start(place, script, "-np", "2", program, *words)
    wait_for(place / "ready")
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=LONGEST_SEC)
    assert (process.returncode, calls(place)) == (code, 1), err
    assert ("kaitian-supervise: ended by SIGUSR2; not started again\n" in err) is (
        "true" not in end
    )
    assert not (place / "run/restart-request").exists()


def test_mpiruns_end_and_code_are_noticed_also_if_sigchld_is_ignored(place):
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)  # which processes inherit
    process = start(place, "exit 2", "-np", "2", "kaitian-train", preexec_fn=ignore)
    process.communicate(timeout=LONGEST_SEC)
    assert (process.returncode, calls(place)) == (2, 1)
    command = [sys.executable, mpirun_process.__file__, "kaitian-train", "token", "0", "sh"]
    done = subprocess.run([*command, "-c", "exit 3"], preexec_fn=ignore, timeout=LONGEST_SEC)
    assert done.returncode == 3


@pytest.mark.linux("elsewhere the kernel sends no signal at the parent's death")
def test_mpirun_does_not_outlive_its_supervisor(place):
    script = f"trap 'echo > ended; exit 0' TERM; {WAIT}"
    with start(place, script, "-np", "2", "kaitian-train") as process:
        wait_for(place / "ready")
        process.kill()
    wait_for(place / "ended")


@pytest.mark.linux("ranks are found in /proc")
@pytest.mark.parametrize("ending", ["", "trap : TERM"], ids=["ends when asked", "has to be killed"])
def test_an_mpirun_that_hangs_after_its_ranks_have_ended_is_terminated(place, ending):
    script = f"""
    [ $call = 2 ] && {{ summary 9 true; exit 0; }}
    {ending}
    OMPI_COMM_WORLD_RANK=0 sleep 1
    exec > nowhere 2>&1
    for i in $(seq 600); do sleep 0.1; done"""
    words = ["-np", "2", "kaitian-train"]
    code, _, err = run(place, script, *words, options=["--hang-seconds", "0.5"])
    assert (code, calls(place)) == (0, 2)
    told = "mpirun is still waiting 0.5 s after its ranks on this machine have ended"
    assert f"{told} (--hang-seconds); terminating it\n" in err
    assert f"mpirun ended with code {137 if ending else 143}, and the job is not finished" in err


@pytest.mark.linux("ranks are found in /proc")
@pytest.mark.parametrize(
    ("options", "hosts", "is_ended"),
    [
        ("--with-ft ulfm", "localhost,198.51.100.5", False),
        *by_default([("--with-ft ulfm", "localhost,198.51.100.2", True)], ()),
        ("--with-ft ulfm", "localhost,198.51.100.4", True),
        *by_default([("--with-ft ulfm", "localhost", True)], ()),
        ("", "localhost,198.51.100.5", True),
    ],
    ids=["lives there", "does not", "no answer", "no other host", "cannot live on"],
)
def test_a_job_with_live_ranks_on_other_hosts_is_not_terminated(place, options, hosts, is_ended):
    """198.51.100.5 reports a rank of every job that it is asked about, the others none."""
    script = """[ $call = 2 ] && { summary 9 true; exit 0; }
    OMPI_COMM_WORLD_RANK=0 sleep 0.7
    exec > nowhere 2>&1
    sleep 2.5; summary 9 true"""
    words = [*options.split(), "--host", hosts, "-np", "2", "kaitian-train"]
    code, _, err = run(place, script, *words, options=["--hang-seconds", "0.3"])
    assert code == 0, err
    assert (calls(place), "mpirun is still waiting" in err) == (2 if is_ended else 1, is_ended)
    said = "no rank is left on this machine; the job continues on 198.51.100.5"
    assert err.count(said) == (0 if is_ended else 1)
    asked = (place / "asked").read_text() if (place / "asked").exists() else ""
    mark = (place / "names").read_text().split()[1]
    question = f"198.51.100.5 grep -qs OMPI_KAITIAN_JOB={mark} /proc/[0-9]*/environ\n"
    assert (question in asked) == (not is_ended)


@pytest.mark.linux("ranks are found in /proc")
@pytest.mark.parametrize(
    ("agent", "hosts", "allocation", "code"),
    [
        ("none", "localhost,b", "", 7),
        ("none", "localhost", "", 143),
        ("false", "localhost,b", "SLURM_JOB_ID", 7),
        *by_default([("true", "localhost,b", "SLURM_JOB_ID", 7)], ()),
        *by_default([("grep-fails", "localhost,b", "SLURM_JOB_ID", 143)], ()),
        *by_default([("none", "", "SLURM_JOB_ID", 7)], ()),
    ],
    ids=["no agent", "no host", "no ssh", "ranks there", "no ranks there", "unknown hosts"],
)
def test_a_job_of_which_it_is_unknown_whether_it_lives_on_is_not_terminated(
    tmp_path, monkeypatch, agent, hosts, allocation, code
):
    """In an allocation, mpirun reaches hosts by the batch system, and ssh may not."""
    write_script(tmp_path / "grep-fails", '#!/bin/sh\n[ "$2" != grep ]\n')
    write_script(tmp_path / "false", "#!/bin/sh\nexit 255\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if allocation:
        monkeypatch.setenv(allocation, "7")
    options = f"--host {hosts}" if hosts else ""
    job = JobCommand(
        command=parse_command(f"mpirun --with-ft ulfm {options} kaitian-train".split()),
        hosts=parse_host_list(hosts) if hosts else (),
        local=frozenset(["localhost"]),
        hostfiles={},
        folder=tmp_path,
        config=TrainConfig(snapshots="a"),
    )
    runner = JobRunner(job, RemoteShell([agent], 20.0), 0.3)
    script = "OMPI_COMM_WORLD_RANK=0 sleep 0.7; sleep 2; exit 7"
    assert runner.run(["sh", "-c", script]) == code


def test_ranks_are_found_by_their_job_id(tmp_path):
    """Runs the command for remote hosts in a local shell."""
    write_script(tmp_path / "agent", '#!/bin/sh\nshift\nexec sh -c "$*"\n')
    common = {"command": parse_command(["kaitian-train"]), "hosts": (), "hostfiles": {}}
    common |= {"folder": tmp_path, "config": TrainConfig(snapshots="a")}
    job = JobCommand(**common, job_id=os.urandom(8).hex())
    shell = RemoteShell([str(tmp_path / "agent")], 20.0)
    ask = partial(shell.hosts_with_ranks, [Host(name="here")], job.job_id)
    assert ask() == frozenset()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **environment(job)}) as rank:
        assert ask() == {"here"}
        rank.kill()
    assert ask() == frozenset()


def test_neither_torch_nor_mpi_nor_numpy_is_imported(place):
    script = (
        "import sys, kaitian_mpi.cli.supervise\n"
        "sys.exit(len({'torch', 'mpi4py', 'numpy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
