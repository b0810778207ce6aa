"""Which accelerator the suite runs on: the first kind with devices, or a stand-in without a GPU.

`KAITIAN_GPU_KIND` names the kind. `vendor` is the fake accelerator of tests/vendor, which has
streams and a collective library. It says nothing about a GPU, and shows that the suite itself runs.
"""

from __future__ import annotations

import os
from pathlib import Path

from kaitian_mpi.devices import known_kinds

_TESTS = Path(__file__).parents[1]

STAND_IN = "vendor"
KIND = os.environ.get("KAITIAN_GPU_KIND", "")


def find() -> tuple[str, int]:
    """Return the kind and how many devices it has; ("", 0) if there is no accelerator."""
    if KIND == STAND_IN:
        return KIND, 2
    counts = {name: n for name, n in known_kinds().counts.items() if n}
    wanted = [name for name in counts if name == KIND or not (KIND or name == "cpu")]
    return (wanted[0], counts[wanted[0]]) if wanted else ("", 0)


def devices(kind: str, accelerators: int, cpus: int) -> list[str]:
    """Return the flag that gives so many ranks an accelerator each, and the others the CPU."""
    names = [f"{kind}:{index}" for index in range(accelerators)]
    return ["--devices", ",".join([*names, *["cpu"] * cpus])]


def environment(kind: str) -> dict[str, str]:
    """Return the variables that a job needs."""
    folders = [str(_TESTS), *([str(_TESTS / "vendor")] if kind == STAND_IN else [])]
    return {"PYTHONPATH": ":".join(folders)}
