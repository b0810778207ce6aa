"""Which accelerator the suite runs on: the first kind with devices, or a stand-in without a GPU.

`KAITIAN_GPU_KIND` names the kind. `vendor` is the fake accelerator of tests/vendor, which has
streams and a collective library. It says nothing about a GPU, and shows that the suite itself runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kaitian_mpi.devices import known_kinds

_BENCHMARKS = Path(__file__).parents[1]
_TESTS = _BENCHMARKS.parent / "tests"

STAND_IN = "vendor"


def _find() -> tuple[str, int]:
    """Return the kind and how many devices it has; ("", 0) if there is no accelerator."""
    chosen = os.environ.get("KAITIAN_GPU_KIND", "")
    if chosen == STAND_IN:
        return chosen, 2
    counts = {name: n for name, n in known_kinds().counts.items() if n}
    wanted = [name for name in counts if name == chosen or not (chosen or name == "cpu")]
    return (wanted[0], counts[wanted[0]]) if wanted else ("", 0)


KIND, COUNT = _find()
IS_FRESH = KIND != STAND_IN
"""Whether each rank is a fresh process: what a GPU's libraries have begun survives no fork."""
BENCHMARK_SEC = 0.2 if KIND == STAND_IN else 4.0
"""How long ranks are benchmarked: what a stand-in takes says nothing."""
needs_accelerator = pytest.mark.skipif(not KIND, reason="no accelerator on this machine")


def devices(accelerators: int, cpus: int) -> list[str]:
    """Return the flag that gives so many ranks an accelerator each, and the others the CPU."""
    names = [f"{KIND}:{index % COUNT}" for index in range(accelerators)]
    return ["--devices", ",".join([*names, *["cpu"] * cpus])]


def command(accelerators: int, *words: str) -> list[str]:
    """Return the command for ranks with so many accelerators, of which there may be but one."""
    if accelerators > COUNT and KIND != "cuda":
        pytest.skip(f"needs {accelerators} devices")
    shared = [sys.executable, str(_TESTS / "gpu/one_as_two.py")] * (accelerators > COUNT)
    return [*shared, *map(str, words)]


def environment() -> dict[str, str]:
    """Return the variables that a job needs."""
    folders = [
        str(_TESTS),
        str(_BENCHMARKS),
        *([str(_TESTS / "vendor")] if KIND == STAND_IN else []),
    ]
    return {"PYTHONPATH": ":".join(folders)}
