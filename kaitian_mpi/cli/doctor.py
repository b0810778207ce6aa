"""`kaitian-doctor`: examines this machine, or under mpirun a job's ranks, before training."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kaitian_mpi import __version__
from kaitian_mpi.cli.flags import OneLineParser, add_flags
from kaitian_mpi.cli.logs import print_text
from kaitian_mpi.devices.choice import SHARE_VARIABLE, declines_library
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.checks import CHECKS
from kaitian_mpi.preflight.examination import Examination
from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.job import Job, NoAnswerError
from kaitian_mpi.preflight.job_checks import run_checks
from kaitian_mpi.preflight.report import Report, to_json, to_text
from kaitian_mpi.preflight.verdict import Verdict
from kaitian_mpi.runtime.abort import (
    abort_job,
    abort_on_error,
    is_mpi_running,
    print_to_stderr,
    rank_prefix,
    report_once,
)
from kaitian_mpi.runtime.launcher import Launch, find_launch
from kaitian_mpi.runtime.lifecycle import initialize_mpi
from kaitian_mpi.runtime.signals import handle_signals
from kaitian_mpi.runtime.watchdog import enter_phase, start_watchdog, stop_watchdog
from kaitian_mpi.supervise.environments import read_environments
from kaitian_mpi.supervise.remote_hosts import examine_hosts

PROGRAM = "kaitian-doctor"
_MAX_TIMEOUT = 3600.0
_START_EXTRA_SEC = 10.0
_WATCHDOG_EXTRA_SEC = 12.0
_FIRST_RANK_SEC = 20.0

Show = Callable[[JobFacts], int]
"""Prints the report on the facts, and returns the exit code."""


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    if make_parser().shows_help(arguments):
        return
    began = time.monotonic()
    launch = find_launch(os.environ)
    handle_signals(PROGRAM)

    def show(job: JobFacts, verdicts: Sequence[tuple[str, Verdict]] = (), subject: str = "") -> int:
        job = replace(job, mpirun=None if launch else shutil.which("mpirun") or "")
        verdicts = verdicts or list(run_checks(job, CHECKS))
        report = Report(job, verdicts, time.monotonic() - began, subject)
        if chosen.json:
            date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            print_text(json.dumps(to_json(report, __version__, date), indent=2))
        else:
            print_text(to_text(report, __version__))
        return report.exit_code

    with abort_on_error(PROGRAM):
        with report_once():
            chosen = read_options(arguments)
        if chosen.hostfile:
            environments = read_environments(chosen.env) if chosen.env else {}
            verdicts = examine_hosts(chosen.hostfile, environments, sys.executable)
            code = show(JobFacts(ranks=()), verdicts, f"hosts of {chosen.hostfile}")
        else:
            code = examine_rank(chosen, show, launch)
    sys.exit(code)


def examine_rank(chosen: argparse.Namespace, show: Show, launch: Launch | None) -> int:
    """Examine this rank of a job, or this machine alone; return the exit code."""
    # Works while a call holds the GIL, as the start of MPI does, and names it. Not the watchdog's
    # SIGKILL: if all ranks die of signals, mpirun --with-ft ulfm exits with code 0.
    faulthandler.dump_traceback_later(chosen.timeout + _START_EXTRA_SEC, exit=True)
    start_watchdog(chosen.timeout + _WATCHDOG_EXTRA_SEC)
    enter_phase("the start of MPI, which needs all ranks", limited=False)
    rank = launch.world_rank if launch else 0
    examination = Examination(chosen, rank)
    try:
        comm = initialize_mpi()
    except UserError as error:
        if launch or not is_mpi_running():
            return examine_without_mpi(examination, str(error), show, rank)
        comm = sys.modules["mpi4py.MPI"].COMM_WORLD  # one machine of a larger allocation
    finally:
        faulthandler.cancel_dump_traceback_later()
    enter_phase(PROGRAM, limited=False)
    job = Job(comm, examination, chosen.timeout)
    try:
        if comm.rank == 0:
            code = show(job.examine())
            job.end(code)
        else:
            code = job.serve()
    except NoAnswerError as error:
        print_to_stderr(f"{rank_prefix()} {PROGRAM}: error: rank 0 {error}; ending this rank")
        abort_job(1)
    if not job.is_clean:
        abort_job(code or 1)
    stop_watchdog()
    return code


def examine_without_mpi(examination: Examination, reason: str, show: Show, rank: int) -> int:
    """Report on this host alone, on the launcher's first rank; return the exit code."""
    if rank == 0:
        facts = examination.results()
        return show(JobFacts(ranks=(replace(facts, faults={**facts.faults, "mpi": reason}),)))
    if not is_mpi_running():  # else the first rank sees the same
        print_to_stderr(f"{rank_prefix()} {PROGRAM}: error: {reason}")
        time.sleep(_FIRST_RANK_SEC)  # the launcher ends all ranks when one exits
        return 1
    return 0


def make_parser() -> OneLineParser:
    """Return the command's parser."""
    parser = OneLineParser(
        PROGRAM,
        "Examine this machine or, under mpirun, all ranks and the links between them: devices, "
        "versions, MPI, memory and disk. Exit code 1 if training would fail.",
        f"mpirun --hostfile hostfiles/two-nodes.txt -np 8 $(which {PROGRAM})",
    )
    parser.add("--json", "print one JSON document (docs/doctor.md) instead of text")
    parser.add(
        "--hostfile",
        "without mpirun: ask the hosts of this hostfile whether they answer and have this "
        "package, within 10 s; mpirun may wait minutes for one that does not answer",
        "FILE",
    )
    parser.add(
        "--env",
        "with --hostfile: a TOML file with each host's interpreter, as for kaitian-env; by "
        "default, all hosts use the path of this command's interpreter",
        "FILE",
    )
    add_flags(parser, {"devices": "devices share_device vendor_library"})
    parser.add(
        "--run-dir",
        "run folder whose file system is examined; nothing is left there (default runs)",
        "DIR",
        "runs",
    )
    parser.add(
        "--timeout",
        "seconds that an examination may take before it counts as failed (default 60)",
        "X",
        60.0,
    )
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse command-line arguments."""
    chosen = make_parser().parse_args(arguments)
    if not 0 < chosen.timeout <= _MAX_TIMEOUT:
        raise UserError(
            f"--timeout must be above 0 and at most {_MAX_TIMEOUT:g} seconds, not "
            f"{chosen.timeout:g}"
        )
    if chosen.env and not chosen.hostfile:
        raise UserError("--env requires --hostfile")
    if chosen.hostfile and find_launch(os.environ) is not None:
        raise UserError("--hostfile cannot be used under mpirun; run it before mpirun")
    chosen.share_device |= os.environ.get(SHARE_VARIABLE) == "1"
    chosen.vendor_library = not declines_library(chosen.vendor_library, os.environ)
    if not chosen.run_dir:
        raise UserError("--run-dir must not be empty; name a folder")
    return chosen


if __name__ == "__main__":
    main()
