"""`kaitian-train -n 4`: mpirun's options, its output, and what is refused."""

import os
import re
import sys

import pytest

from kaitian_mpi.cli import flags, run, supervise, train
from kaitian_mpi.cli.flags import make_parser
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.mpi_libraries import MPICH, OPEN_MPI, identify_launcher
from kaitian_mpi.supervise.hosts import parse_hostfile
from kaitian_mpi.supervise.launch_command import (
    LaunchRequest,
    Mpirun,
    choose_ranks,
    forwarded_names,
    mpirun_options,
)
from kaitian_mpi.supervise.mpirun_output import MpirunOutput

RULE = "-" * 74
ABORT = f"""{RULE}
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[19326,1],1]
  Errorcode: 3

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}
"""
ABORTED = f"""{RULE}
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}
"""
EXITED = f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-8081@1,1]
   Exit code:    4
{RULE}
"""
KILLED = f"""{RULE}
prterun noticed that process rank 1 with PID 10786 on node vm exited on
signal 9 (Killed).
{RULE}
"""
SORRY = f"""{RULE}
Sorry!  You were supposed to get help about:
    proc-aborted
But I couldn't open the help file:
    /nowhere/help-prterun.txt: No such file or directory.  Sorry!
{RULE}
"""
REPEATED = "[vm:12] 2 more processes have sent help message help-mpi-api.txt / mpi-abort\n"
ABORT_OF_MPICH = (
    "Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 5) - "
    "process 1\n"
)
SLOTS = f"{RULE}\nThere are not enough slots available in the system\n{RULE}\n"
TOKEN = "\x1e0123abcd"


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("text", "shown", "cause"),
    [
        (
            f"train: error: no\n{ABORT}\0{ABORTED}\0",
            "train: error: no\n",
            "rank 1 called MPI_Abort",
        ),
        (EXITED, "", "rank 1 ended with exit code 4"),
        (f"50%|##{KILLED}\0end\n", "50%|##end\n", "rank 1 on vm was killed by signal 9 (Killed)"),
        (SORRY + REPEATED + "own\n", "own\n", ""),
        (f"{SLOTS}x", f"{SLOTS}x", ""),
        (f"own\n{ABORT_OF_MPICH}", "own\n", ""),
        (f"-{RULE}\nown\n{RULE}-\n", f"-{RULE}\nown\n{RULE}-\n", ""),
        (f"{RULE}\n" + "own\n" * 60, f"{RULE}\n" + "own\n" * 60, ""),
    ],
)
def test_what_mpi_says_about_the_end_is_held_back_and_all_else_is_shown(text, shown, cause, size):
    output = MpirunOutput(TOKEN)
    data = text.encode()
    parts = [output.read(data[at : at + size]) for at in range(0, len(data), size)]
    assert (b"".join(parts) + output.flush()).decode() == shown
    assert output.cause == cause
    assert output.has_error == ("error" in text and "train:" in text)
    assert not output.has_finished


def test_progress_without_a_line_is_shown_at_once_and_a_token_never():
    output = MpirunOutput(TOKEN)
    assert output.read(b"\r 10%") == b"\r 10%"
    assert output.read(TOKEN[:4].encode()) == b""
    assert output.read(TOKEN[4:].encode() + b"\n\r 20%") == b"\r 20%"
    assert output.has_finished
    assert output.read(b"-----") == b""  # it may become a rule
    assert output.flush() == b"-----"
    assert output.read(b"[2@vm] Traceback (most recent call last):\n")
    assert output.has_error


def options(release="5.0.11", library=OPEN_MPI, environ=(), root=False, **request):
    mpirun = Mpirun(path="mpirun", library=library, release=release)
    request = LaunchRequest(**{"ranks": 4, **request})
    return " ".join(mpirun_options(mpirun, request, dict.fromkeys(environ, "1"), root))


def test_mpirun_gets_what_its_library_and_place_need():
    hosts = parse_hostfile("a slots=2\nme@b slots=2", "f")
    on_hosts = {"hosts": hosts, "hostfile": "f"}
    here = "--map-by :oversubscribe --bind-to none -np 4"
    assert options() == f"--with-ft ulfm {here}"
    assert options(root=True) == f"--allow-run-as-root --with-ft ulfm {here}"
    assert options(survives=False) == here
    assert options("4.1.4") == "--oversubscribe --bind-to none -np 4"
    assert options(environ=["SLURM_JOB_ID"]) == "--with-ft ulfm --bind-to none -np 4"
    there = "--with-ft ulfm --hostfile f --map-by slot --bind-to none"
    assert options(environ=["A"], **on_hosts) == f"{there} -np 4"
    forwarded = options(environ=["B", "A", "HOME"], has_remote=True, **on_hosts)
    assert forwarded == f"{there} -x A -x B -np 4"
    assert options("4.3", MPICH, ["A"], True) == "-n 4"
    assert options("4.3", MPICH, ["A"], True, **on_hosts) == "-hosts a:2,b:2 -n 4"
    assert options("", None) == "-n 4"


def test_the_environment_of_a_job_is_passed_on_and_not_that_of_a_session():
    job = ["DATA", "HF_HOME", "LD_LIBRARY_PATH", "NCCL_DEBUG", "PATH", "PYTHONPATH", "TERM"]
    session = ["_", "HOME", "PWD", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "BASH_FUNC_m%%", "TMPDIR"]
    session += ["CUDA_VISIBLE_DEVICES", "SLURM_PROCID", "OMPI_MCA_btl", "PRTE_MCA_plm", "LMOD_CMD"]
    assert forwarded_names(session + job) == job


@pytest.mark.parametrize(
    ("text", "library", "release"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", OPEN_MPI, "5.0.11"),
        ("HYDRA build details:\n    Version:              5.0.2\n    CC: cc", MPICH, "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 1", MPICH, "2021.11"),
        ("some other launcher 1.0", None, ""),
    ],
)
def test_a_launcher_is_known_by_its_version(text, library, release):
    assert identify_launcher(text) == (library, release)
    assert Mpirun(path="", library=library, release=release).can_survive == (library is OPEN_MPI)


def test_ranks_are_as_many_as_given_or_as_slots():
    hosts = parse_hostfile("a slots=2\nb slots=1", "f")
    assert choose_ranks(None, hosts, "f") == 3
    assert choose_ranks(2, hosts, "f") == 2
    assert choose_ranks(8, parse_hostfile("a", "f"), "f") == 8
    for ranks, hosts_of, message in (
        (4, hosts, "only 3 slots for 4 ranks"),
        (None, parse_hostfile("a", "f"), "write slots=N"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            choose_ranks(ranks, hosts_of, "f")


def test_the_ranks_get_the_arguments_without_those_about_mpirun():
    for words in ("-n 4", "-np 4", "-n4", "-n=4", "--hostfile h -n 4", "--hostfile=h", "-n 4 "):
        arguments = [*words.split(), "--no-fault-tolerance", "--model", "a b", "--set", "x=-n"]
        assert flags.without_launch_flags(arguments) == ["--model", "a b", "--set", "x=-n"]


@pytest.mark.parametrize("command", [train, run])
@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        ("-n 4", "OMPI_COMM_WORLD", "-n starts mpirun, but this process is a rank already"),
        ("--hostfile h", "PMI_RANK", "--hostfile starts mpirun, but this process is a rank"),
        ("-n 0", "", "argument -n/-np: '0' is not a number of ranks; give at least 1"),
        ("-n x", "", "argument -n/-np: 'x' is not a number of ranks; give at least 1"),
        ("-n 1000000", "", "argument -n/-np: '1000000' is not a number of ranks"),
        ("--hostfile nowhere", "", "nowhere is not a regular file; name a hostfile"),
        ("--hostfile=", "", "--hostfile has an empty value"),
        ("--no-fault-tolerance", "", "--no-fault-tolerance requires -n"),
        ("-n 2", "PATH", "-n needs mpirun, and there is none in this environment or on PATH"),
    ],
)
def test_what_cannot_be_started_is_refused_in_a_line(
    command, words, variable, message, monkeypatch, tmp_path, capfd
):
    (tmp_path / "script.py").touch()
    if variable == "OMPI_COMM_WORLD":
        for name, value in zip(OPEN_MPI.rank_variables, "0101", strict=True):
            monkeypatch.setenv(name, value)
    elif variable:
        monkeypatch.setenv(variable, "0")
    monkeypatch.chdir(tmp_path)
    if variable == "PATH":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    rest = ["script.py"] if command is run else ["--model", "cnn"]
    monkeypatch.setattr(sys, "argv", [command.PROGRAM, *words.split(), *rest])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith(f"{command.PROGRAM}: error: {message}")
    assert error.count("\n") == 1


def test_a_supervised_job_names_mpirun(monkeypatch):
    monkeypatch.chdir(os.sep)
    for program in ("kaitian-train -n 4 --model cnn", "kaitian-run -n 4 train.py"):
        with pytest.raises(UserError, match="write mpirun before"):
            supervise.make_job(program.split())


def test_the_help_names_the_form_with_and_without_mpirun():
    text = make_parser("kaitian-train").format_help()
    assert "kaitian-train -n N [flags]  or  mpirun -np N kaitian-train [flags]" in text
