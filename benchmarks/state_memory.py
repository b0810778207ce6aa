"""How much memory it takes to save a large training state and to resume from it.

    python benchmarks/state_memory.py               # 2 ranks and a state of 480 MB each
    python benchmarks/state_memory.py --mb 2048     # needs 16 GB of memory

Trains a model whose weights and AdamW's two moments are that large, in one job that is stopped and
one that resumes. Prints the largest memory of each rank relative to the state, which is the least
that a rank can have: while it trains (with gradients, a third of the state), while a checkpoint is
written in the background from a copy, and while the second job resumes up to its first step: there
world rank 0 reads the file and the other rank receives the state from it. What the process had
before there was a model is subtracted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH = 1024
STEPS = 8
PHASES = ("train", "write a checkpoint", "resume, up to the first step")


def memory_mb(name: str) -> float:
    """Return this process's memory in MB: VmRSS, or the largest so far, VmHWM."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def restart_peak() -> None:
    """Reset VmHWM to the present memory."""
    Path("/proc/self/clear_refs").write_text("5")


def train(state_mb: int, run_dir: str) -> None:
    """Train on this rank, and print what it took. Collective."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values

    world = kaitian_mpi.init()
    torch.manual_seed(0)
    layers = state_mb * 2**20 // (3 * 4 * WIDTH * WIDTH)
    empty_mb = memory_mb("VmRSS")
    task = kaitian_mpi.Task(
        model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
        data=torch.randn(4096, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
    )

    def show(phase: str) -> None:
        peaks = gather_values(world.comm, (memory_mb("VmHWM") - empty_mb) / state_mb)
        if world.rank == 0:
            print(f"| {phase} | {' | '.join(f'{peak:.2f}' for peak in peaks)} |", flush=True)

    restart_peak()
    with kaitian_mpi.Training(
        task,
        global_batch_size=8,
        run_dir=run_dir,
        resume="auto",
        max_steps=2 * STEPS,
        balance="off",
    ) as training:
        for step in training:
            if step.number == STEPS + 1:
                show(PHASES[2])
                return
            if step.number == 2:
                restart_peak()
            elif step.number == STEPS - 1:
                show(PHASES[0])
                restart_peak()
            elif step.number == STEPS:
                break
    show(PHASES[1])
    dist.destroy_process_group()


def main() -> None:
    """Run both jobs, or with --run-dir one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=480, help="size of the state")
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_dir:
        train(options.mb, options.run_dir)
        return
    print("| largest memory, relative to the state | rank 0 | rank 1 |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = f"{folder}/run"
        command = ["mpirun", "-np", "2", sys.executable, __file__, "--mb", str(options.mb)]
        for _ in range(2):
            done = subprocess.run(
                [*command, "--run-dir", run_dir], stdout=subprocess.PIPE, text=True, check=True
            )
            print(
                "\n".join(re.findall(rf"^\| (?:{'|'.join(PHASES)}) .*", done.stdout, re.MULTILINE))
            )


if __name__ == "__main__":
    main()
