"""Kills processes while they write a checkpoint, and checks that a checkpoint can be loaded.

    python benchmarks/recovering/writing.py

The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch

from kaitian_mpi.train.checkpoint.files import CheckpointFiles

_TENSORS, _ELEMENTS = 480, 10_000  # 19 MB, the size of MobileNetV2 with momentum


def write(files: CheckpointFiles, number: int) -> float:
    """Write a checkpoint filled with its number; return the seconds. Each step is written twice."""
    state = {str(i): torch.full((_ELEMENTS,), float(number)) for i in range(_TENSORS)}
    began = time.perf_counter()
    files.write(state, {"step": number // 2, "number": number})
    return time.perf_counter() - began


def killed_while_writing(files: CheckpointFiles, number: int, after_sec: float) -> bool:
    """Write in a child and kill it after `after_sec`; return whether it was still writing."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        state = {str(i): torch.full((_ELEMENTS,), float(number)) for i in range(_TENSORS)}
        os.write(write_end, b"x")
        files.write(state, {"step": number // 2, "number": number})
        os._exit(0)
    os.read(read_end, 1)
    os.close(read_end)
    os.close(write_end)
    time.sleep(after_sec)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def number_found(files: CheckpointFiles) -> int | None:
    """Return the number of the newest checkpoint that loads; None unless it is complete."""
    found = files.newest_good()
    if found is None or len(found.state) != _TENSORS:
        return None
    number: int = found.description["number"]
    expected = torch.full((_ELEMENTS,), float(number))
    return number if all(torch.equal(t, expected) for t in found.state.values()) else None


def measure(folder: Path, kills: int, seed: int) -> dict[str, float]:
    """Kill writes at random moments, until `kills` were killed before they had finished."""
    torch.set_num_threads(1)  # torch's worker threads do not survive a fork
    choice = random.Random(seed)
    files = CheckpointFiles(folder, keep=1)
    usual = statistics.median(write(files, number) for number in range(4))
    last, number, counts = 3, 3, {"new": 0, "old": 0, "none": 0}
    while sum(counts.values()) < kills:
        number += 1
        was_killed = killed_while_writing(files, number, choice.uniform(0, usual))
        found = number_found(files)
        if was_killed:
            counts[{number: "new", last: "old"}.get(found, "none")] += 1
        last = found if found is not None else last
    good = counts["new"] + counts["old"]
    return {"kills": kills, "good": good, **counts, "write_sec": usual, "late": number - 3 - kills}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaitian-writing-") as folder:
        print(json.dumps(measure(Path(folder), options.kills, options.seed)))


if __name__ == "__main__":
    main()
