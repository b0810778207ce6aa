"""`kaitian-train -n 2` and `kaitian-run -n 2`: real jobs that a command starts mpirun for.

Where it starts ranks itself, a fresh command has a process of its own that forks them.
"""

import os
import re
import shlex
import signal
import subprocess

import pytest
from jobs import (
    ENVIRONMENT,
    EVEN,
    LONGEST_SEC,
    PLANTED,
    SCRIPTS,
    SOON_SEC,
    HostsJob,
    LaunchedJob,
    run_alone,
    steps_saved,
    summary_of,
    write_launching_program,
)
from shared.emulated_hosts import reason_to_skip
from shared.processes import assert_gone

# Without what the tests' own environment lets mpirun do.
WITHOUT_POLICY = {"PRTE_MCA_rmaps_default_mapping_policy": ""}
TRAIN = ["kaitian-train", "-n", "2", "--model", "planted:Slow", *EVEN]
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "says", sys.argv[2], flush=True)
dist.barrier()
if dist.get_rank() == 1 or sys.argv[1] == "all":
    if sys.argv[1] == "raise":
        raise RuntimeError("planted")
    if sys.argv[1] == "exit":
        sys.exit(5)
    if sys.argv[1] in ("kill", "all"):
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def path_with_launching(folder, name):
    """Return the PATH on which the command is one that forks its ranks."""
    program = write_launching_program(folder / "bin", name)
    return f"{program.parent}:{ENVIRONMENT['PATH']}"


def run_script(folder, *words, code):
    (folder / "script.py").write_text(SCRIPT)
    # Without what the tests' own environment lets mpirun do.
    without = dict.fromkeys([name for name in ENVIRONMENT if name.startswith("PRTE_MCA_")], "")
    command = ("kaitian-run", "-n", "2", *words)
    without["PATH"] = path_with_launching(folder, command[0])
    return run_alone(*command, cwd=folder, fresh=True, code=code, **without)


@pytest.mark.parametrize(
    ("how", "options", "code", "shown", "last"),
    [
        pytest.param(
            "raise",
            "",
            1,
            r"^\[1@\S+\] RuntimeError: planted$",
            "the job ended with exit code 1",
            marks=pytest.mark.thorough,
        ),
        ("exit", "--no-fault-tolerance", 5, r"sys.exit\(5\) before the run was", "exit code 5"),
        pytest.param(
            "kill",
            "--no-fault-tolerance",
            137,
            "signal 9",
            "killed by signal 9 (Killed); the job",
            marks=pytest.mark.thorough,
        ),
        ("all", "", 1, "", "no rank has finished: all were killed, or their hosts were lost; the"),
    ],
)
def test_a_job_ends_with_its_own_code_and_one_last_line(tmp_path, how, options, code, shown, last):
    script_arguments = ("--backend-override", "gloo", "script.py", how, "a 'b'")
    ended = run_script(tmp_path, *options.split(), *script_arguments, code=code)
    first, *_, end = ended.err.splitlines()
    assert "rank 0 says a 'b'" in ended.out
    assert re.search(shown, ended.err, re.MULTILINE), ended.err
    assert end.startswith("kaitian-run: ")
    assert last in end
    is_explained = how in ("raise", "exit")
    assert ("prterun" in ended.err) == (how == "kill"), ended.err
    assert "MPI_ABORT" not in ended.err
    assert not is_explained or "-----" not in ended.err
    words = shlex.split(first.removeprefix("+ "))
    assert words[0] == "mpirun"
    assert ("--with-ft" in words) == (not options)
    assert words[words.index("kaitian-run") :] == ["kaitian-run", *script_arguments]


@pytest.mark.thorough
def test_a_lost_rank_is_survived_and_the_printed_command_does_the_same(tmp_path):
    command = [*TRAIN, "--max-steps", "6"]
    with LaunchedJob(*command, cwd=tmp_path, **WITHOUT_POLICY) as job:
        printed = job.wait_for(r"^\+ (mpirun .*)$")[1]
        job.wait_for(r"fault tolerance: on")
        job.wait_for(r"step 2/")
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        job.wait_for(r"rank 1 \(.*\) was lost")
        ended = job.finish()
    assert summary_of(tmp_path)["ranks"] == [0]
    assert "the job ended" not in ended.text
    again = (*shlex.split(printed), *"--max-steps 1 --run-dir again".split())
    assert run_alone(*again, cwd=tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_the_command_reaches_the_job_which_saves(tmp_path, number):
    with LaunchedJob(*TRAIN, "--max-steps", "200", cwd=tmp_path, **WITHOUT_POLICY) as job:
        job.wait_for(r"step 2/")
        pids = [process.pid for process in job.started()]
        job.process.send_signal(number)
        ended = job.finish(code=0 if number == signal.SIGUSR2 else 128 + number)
        assert_gone(pids, SOON_SEC)
    assert steps_saved(tmp_path)
    assert "--resume auto resumes from it" in ended.text
    assert "the job ended with" not in ended.text


def test_ctrl_c_at_a_terminal_reaches_the_job_once(tmp_path):
    master, slave = os.openpty()
    command = [*TRAIN, "--max-steps", "200"]
    process = subprocess.Popen(
        ["setsid", "--ctty", str(SCRIPTS / command[0]), *command[1:]],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(PLANTED)},
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
    )
    os.close(slave)
    written, is_sent = b"", False
    try:
        while data := os.read(master, 65536):
            written += data
            if b"step 2/" in written and not is_sent:
                os.write(master, b"\x03")
                is_sent = True
    except OSError:  # the last process at the terminal has ended
        pass
    assert process.wait(LONGEST_SEC) == 128 + signal.SIGINT, written.decode()
    os.close(master)
    assert written.count(b"interrupted by Ctrl-C") + written.count(b"terminated by SIGTERM") == 1
    assert b"--resume auto resumes from it" in written
    assert steps_saved(tmp_path)


def test_no_rank_outlives_a_killed_command(tmp_path):
    with LaunchedJob(*TRAIN, "--max-steps", "200", cwd=tmp_path, **WITHOUT_POLICY) as job:
        job.wait_for(r"step 1/")
        pids = [process.pid for process in job.started()]
        assert len(pids) >= 3
        job.process.kill()
        assert_gone(pids, SOON_SEC)


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_ranks_on_other_hosts_get_the_environment(hosts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(socket.gethostname(), os.environ.get('OWN'), 'rank', dist.get_rank(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    program = SCRIPTS / "kaitian-run"
    if hosts.have_group:
        program = write_launching_program(tmp_path / "bin", program.name)
    command = [str(program), "--hostfile", str(hosts.hostfile)]
    command += ["--backend-override", "gloo", str(script)]

    class OnHosts(HostsJob):
        def __init__(self):
            words = hosts.on_first("env", "OWN=set here", *command)
            self._start(*words, cwd=tmp_path, env={})

    with OnHosts() as job:
        job.wait_for(r"-np 3 ")
        ended = job.finish()
    lines = re.findall(r"^(host\d) set here rank (\d)$", ended.text, re.MULTILINE)
    assert sorted(lines) == [("host1", "0"), ("host1", "1"), ("host2", "2")], ended.text
