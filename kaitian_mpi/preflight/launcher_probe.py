"""Examines the mpirun that the shell finds: whose it is, and whether the ranks it starts meet."""

from __future__ import annotations

import json
import os
import re
import shutil

from kaitian_mpi.preflight.facts import Launcher
from kaitian_mpi.preflight.stages import COMMAND, run
from kaitian_mpi.runtime.mpi_libraries import OVERSUBSCRIBE, parse_launcher_version

_VERSION_SEC = 10.0
_MAX_MESSAGE = 300


def examine_launcher(limit_sec: float) -> Launcher:
    """Ask mpirun for its version, and have it start two ranks that count themselves.

    Args:
        limit_sec: how long the start may take.
    """
    path = shutil.which("mpirun") or ""
    if not path:
        return Launcher(path="", library="", started=None, error="")
    try:
        _, out, err = run([path, "--version"], _VERSION_SEC, os.environ)
        library = parse_launcher_version(out + err)
        # Two ranks even where there is one core.
        environ = {**OVERSUBSCRIBE, **os.environ}
        command = [path, "-np", "2", *COMMAND, "count", "{}"]
        code, out, err = run(command, limit_sec, environ)
    except OSError as error:
        return Launcher(path=path, library="", started=None, error=str(error))
    if code == 0:
        return Launcher(path=path, library=library, started=parse_count(out), error="")
    how = f"no answer within {limit_sec:g} s" if code is None else f"exit code {code}"
    said = " ".join(re.sub(r"-{4,}", " ", (err or out).replace("\0", "")).split())
    text = f"{how}: {said[:_MAX_MESSAGE]}" if said else how
    return Launcher(path=path, library=library, started=None, error=text)


def parse_count(text: str) -> int:
    """Return how many ranks each rank saw, the fewest, from what the ranks printed."""
    counts = [json.loads(found)["size"] for found in re.findall(r'\{"size": \d+\}', text)]
    return min(counts, default=0)
