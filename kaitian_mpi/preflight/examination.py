"""Examines one process and its host, without other ranks.

Anything that may hang or crash is examined in a separate process (`probe.py`) with a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from kaitian_mpi.preflight.facts import RankFacts, collect, part_from_json
from kaitian_mpi.preflight.limited_process import LimitedProcess
from kaitian_mpi.runtime.mpi_libraries import LIBRARIES

COMMAND = (sys.executable, "-P", "-m", "kaitian_mpi.preflight.probe")
"""The command of an examination's process; -P: nothing is imported from the current folder."""

_JOINING = tuple(library.joining for library in LIBRARIES)
_MAX_MESSAGE = 400


class Examination:
    """The background examinations of one rank, as set by the doctor's `options`."""

    def __init__(self, options: Namespace, rank: int) -> None:
        self.first_facts = facts = collect(socket.gethostname(), rank)
        """The facts that are known immediately."""
        self._stages = {
            "devices": start_stage(
                "devices",
                options.timeout,
                devices=options.devices,
                share=options.share_device,
                vendor_library=options.vendor_library,
                host=facts.host,
                local_rank=facts.local_rank,
                local_size=facts.local_size,
            )
        }
        if facts.local_rank == 0:
            stage = start_stage("storage", options.timeout, run_dir=options.run_dir)
            self._stages["storage"] = stage

    def results(self) -> RankFacts:
        """Wait until every examination has ended or timed out; return the facts."""
        parts = {}
        faults = {}
        for name, stage in self._stages.items():
            result, fault = result_of(stage)
            if fault:
                faults[name] = fault
            else:
                parts[name] = part_from_json(name, result)
        return replace(self.first_facts, **parts, faults=faults)


def start_stage(name: str, seconds: float, **arguments: Any) -> LimitedProcess:
    """Start one of the examinations in `probe.py`; JSON must be able to hold the arguments."""
    # With the variables by which MPI finds the launcher, a process whose imports start MPI would
    # join the job as this very rank, and write into the shared memory of the real one.
    outside = {name: text for name, text in os.environ.items() if not name.startswith(_JOINING)}
    return LimitedProcess([*COMMAND, name, json.dumps(arguments)], seconds, outside)


def result_of(stage: LimitedProcess) -> tuple[Any, str]:
    """Wait for an examination; return its facts, and else why it failed."""
    code, out, err = stage.wait()
    lines = [line.strip() for line in err.replace("\0", "").splitlines() if line.strip(" \t-=")]
    last = lines[-1][:_MAX_MESSAGE] if lines else ""
    if code is None:
        said = f"; it said: {last}" if last else ""
        return None, f"no answer within {stage.seconds:.0f} s{said}"
    if code:
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return None, last or killed
    try:
        return json.loads(out), ""
    except ValueError:
        return None, "no result"
