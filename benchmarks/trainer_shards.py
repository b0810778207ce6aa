"""Compares DDP whose gradients are summed to owners with stock DDP, alternating in one run.

    mpirun -np 2 --map-by core --bind-to core python benchmarks/trainer_shards.py [speed] [save]
    mpirun -np 2 --map-by core --bind-to core python benchmarks/trainer_shards.py adaptive
    mpirun -np 2 python benchmarks/trainer_shards.py memory --file /tmp/saved.pt
    mpirun -np 2 python benchmarks/trainer_shards.py resume --file /tmp/saved.pt

Prints, with shares 3:1 of a GPT's gradients and optimizer state:

    speed    the step of `kaitian-run --layout shard` / that of stock DDP over kaitian, with whole
             and with sharded parameters: the median over the pairs of neighboring steps, and the
             quartiles
    save     the seconds in which rank 0 alone saves an optimizer's state that others own in part /
             those for a state of its own; and the largest of rank 0's peaks of memory in which it
             saves the optimizer's and the model's state, beyond that of stock DDP's, in units of
             the largest parameter
    adaptive the step of `kaitian-run --adaptive --layout shard` / that of `--adaptive` alone, where
             rank 1 is three times slower and the ranks own equal shares
    memory   each rank's peak of memory beyond that before, with sharded parameters and a model
             that begins on meta on all ranks but 0: at the start, in steps, and while rank 0 saves
             to the file; and what is planned without activations: the rank's share, and four of
             the largest parameters or buckets. As where memory is short, freed memory is returned
    resume   the same when that file is loaded, and in the steps after it

World rank 0 prints.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from shared.comparison import in_turns, quartiles, ratios
from shared.gpt import GPT, loss_of, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kaitian_mpi import init
from kaitian_mpi.balance.ownership import BUCKET_CAPS, without_mirrors
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.integrations.adaptive import install
from kaitian_mpi.integrations.shard import trainer_shards
from kaitian_mpi.integrations.shard.budget import LayoutSettings, Owners
from kaitian_mpi.integrations.shard.host_parameters import as_plain
from kaitian_mpi.integrations.shard.install import Installed
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.shard.memory_budget import USUAL_STATES, is_worth_sharding

VOCABULARY, LENGTH = 256, 32
_EVERY_SEC = 2e-3
_STEPS_PER_EPOCH = 50
_STEPS_TO_FOLLOW = 30
_SLOWDOWN = 3
SHARES = 3.0, 1.0, 2.0, 1.0


class Trainer:
    """A GPT in DDP, and its optimizer."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(VOCABULARY, LENGTH, options.width, options.layers))
        self.optimizer = make_optimizer(self.model)
        self.batch = torch.randint(VOCABULARY, (options.batch, LENGTH + 1), device="cpu")

    def step(self) -> float:
        """Train one step and return the seconds of the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.model, self.batch).backward()
        self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def save(self) -> float:
        """Let rank 0 save the optimizer's state, and return its seconds."""
        dist.barrier()
        began = time.perf_counter()
        if dist.get_rank() == 0:
            write(self.optimizer.state_dict())
        seconds = torch.tensor(time.perf_counter() - began)
        dist.broadcast(seconds, 0)
        return seconds.item()

    def save_peak_mb(self) -> float:
        """Let rank 0 save both states, and return its peak of memory beyond that before."""
        peak_mb = torch.zeros(())
        dist.barrier()
        if dist.get_rank() == 0:
            gc.collect()
            present = own_memory_mb()
            with Peak() as peak:
                write(self.optimizer.state_dict())
                write(self.model.module.state_dict())
            peak_mb += peak.mb - present
        dist.broadcast(peak_mb, 0)
        return peak_mb.item()


def write(content: object) -> None:
    """Write a file of torch.save, and delete it."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(content, Path(folder, "saved.pt"))


class AdaptiveTrainer(Trainer):
    """One whose batches follow the ranks' speed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        rows = options.batch * dist.get_world_size() * _STEPS_PER_EPOCH
        data = TensorDataset(torch.randint(VOCABULARY, (rows, LENGTH + 1)))
        self._loader = DataLoader(data, options.batch, sampler=DistributedSampler(data))
        self._batches: Iterator[list[torch.Tensor]] = iter(())

    def step(self) -> float:
        """Train one step and return this rank's seconds; the ranks meet in its backward."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self.optimizer.zero_grad()
        loss_of(self.model, batch[0]).backward()
        self.optimizer.step()
        return time.perf_counter() - began


def let_own(are_sharded: bool, shares: Sequence[float]) -> None:
    """Let ranks own these shares of models, whatever their memory is."""

    def find_owners(
        settings: LayoutSettings, world: World, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> Owners:
        numbers = frozenset(
            number
            for number, parameter in enumerate(model.parameters())
            if are_sharded and is_worth_sharding(as_plain(parameter))
        )
        return Owners(without_mirrors(shares[: world.size]), numbers, True, "")

    trainer_shards.find_owners = find_owners


def measure_memory(world: World, options: argparse.Namespace, *, resumes: bool) -> None:
    """Print each rank's peaks, in MB: of a start and a save, or of a resume from what was saved."""
    Installed(world, LayoutSettings())
    let_own(True, options.shares)
    small = argparse.Namespace(**{**vars(options), "width": 64, "layers": 1})
    for _ in range(3):
        Trainer(small).step()  # for what the first ones import, and allocate permanently
    CpuDevice().return_large_blocks()
    CpuDevice().return_freed_memory()
    peaks: dict[str, float] = {}
    present = own_memory_mb()

    def phase(name: str, work: Callable[[], object]) -> None:
        dist.barrier()
        gc.collect()
        with Peak() as peak:
            work()
        peaks[name] = peak.mb - present
        dist.barrier()

    with torch.device("cpu" if world.rank == 0 else "meta"):
        trainer = Trainer(options)

    def forward() -> None:
        loss_of(trainer.model, trainer.batch)

    def steps() -> None:
        for _ in range(3):
            trainer.step()

    def save() -> None:
        if world.rank == 0:
            content = trainer.model.module.state_dict(), trainer.optimizer.state_dict()
            torch.save(content, options.file)

    def resume() -> None:
        model, optimizer = torch.load(options.file, mmap=True, weights_only=True)
        if world.rank == 0:
            trainer.model.module.load_state_dict(model)
        trainer.optimizer.load_state_dict(optimizer)
        forward()

    if resumes:
        phase("resume", resume)
        phase("steps after it", steps)
    else:
        phase("start", forward)
        phase("steps", steps)
        phase("save", save)
    sizes = [parameter.nbytes / 1e6 for parameter in trainer.model.module.parameters()]
    share = options.shares[world.rank] / sum(options.shares[: world.size])
    text = ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items())
    planned = (USUAL_STATES + 2) * share * sum(sizes) + 4 * max(*sizes, BUCKET_CAPS[1] / 1e6)
    line = f"rank {world.rank}: {text}; planned {planned:.0f} MB, the model has {sum(sizes):.0f} MB"
    lines = gather_values(world.comm, line)
    if world.rank == 0:
        print("\n".join(lines), flush=True)


def own_memory_mb() -> float:
    """Return this process's memory without files and what it shares with others."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["RssAnon"].split()[0]) / 1e3


class Peak:
    """The largest memory of this process while this is entered, as sampled."""

    def __enter__(self) -> Peak:
        self.mb = own_memory_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_SEC):
            self.mb = max(self.mb, own_memory_mb())

    def __exit__(self, *_: object) -> None:
        self.mb = max(self.mb, own_memory_mb())
        self._ended.set()
        self._thread.join()


def measure_adaptive(world: World, options: argparse.Namespace) -> None:
    """Print the ratio of the steps with a slow rank, once the batches follow the speed."""
    adaptive = install(world)
    assert adaptive is not None
    trainers = {"replicate": AdaptiveTrainer(options)}
    trainers["replicate"].step()
    Installed(world, LayoutSettings(), adaptive.waiting)
    for name, are_sharded in (("whole", False), ("sharded", True)):
        let_own(are_sharded, [1.0] * world.size)
        trainers[name] = AdaptiveTrainer(options)
        trainers[name].step()
    calls = {name: trainer.step for name, trainer in trainers.items()}
    in_turns(calls, _STEPS_TO_FOLLOW)
    seconds = in_turns(calls, options.pairs)
    for name in ("whole", "sharded") if world.rank == 0 else ():
        ratio = quartiles(ratios(seconds[name], seconds["replicate"]))
        print(f"adaptive: {name} / replicate {ratio}, {statistics.median(seconds[name]):.3f} s")
    adaptive.close()


def make_trainers(world: World, options: argparse.Namespace) -> dict[str, Trainer]:
    """Return a trainer in stock DDP, and those with whole and with sharded parameters."""
    trainers = {"stock": Trainer(options)}
    trainers["stock"].step()  # which makes its optimizer's state
    Installed(world, LayoutSettings())  # until the process ends
    stock_owners = trainer_shards.find_owners
    for name, are_sharded in (("whole", False), ("sharded", True)):
        let_own(are_sharded, options.shares)
        trainers[name] = Trainer(options)
        trainers[name].step()
    trainer_shards.find_owners = stock_owners
    return trainers


def compare_peaks(trainers: dict[str, Trainer]) -> None:
    """Print rank 0's peaks of memory in saves beyond stock DDP's, by the largest parameter."""
    CpuDevice().return_large_blocks()
    largest_mb = max(p.nbytes for p in trainers["stock"].model.module.parameters()) / 1e6
    peaks = in_turns({name: trainer.save_peak_mb for name, trainer in trainers.items()}, 5)
    for name in ("whole", "sharded") if dist.get_rank() == 0 else ():
        beyond = max(peaks[name]) - max(peaks["stock"])
        print(f"save: {name} - stock {beyond / largest_mb:.2f} of the largest parameter's memory")


def main() -> None:
    """Run the comparisons; world rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections",
        nargs="*",
        default=["speed", "save"],
        help="speed, save; or adaptive; or memory; or resume",
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12, help="12 of width 256: 10 M parameters")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--file", type=Path, help="that memory saves, and resume loads")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the ranks")
    options = parser.parse_args()

    if "adaptive" in options.sections:
        measure_adaptive(init(emulate_slowdown=f"1:{_SLOWDOWN}"), options)
        dist.destroy_process_group()
        return
    world = init()
    if {"memory", "resume"} & {*options.sections}:
        if options.file is None:
            parser.error("give --file")
        measure_memory(world, options, resumes="resume" in options.sections)
        dist.destroy_process_group()
        return
    trainers = make_trainers(world, options)
    parameters = sum(p.numel() for p in trainers["stock"].model.parameters())
    if world.rank == 0:
        print(f"{world.size} ranks, {parameters / 1e6:.1f} M parameters")
    for section in options.sections:
        calls = {
            name: trainer.step if section == "speed" else trainer.save
            for name, trainer in trainers.items()
        }
        seconds = in_turns(calls, options.pairs if section == "speed" else 5)
        for name in ("whole", "sharded") if world.rank == 0 else ():
            ratio = quartiles(ratios(seconds[name], seconds["stock"]))
            median = statistics.median(seconds[name])
            print(f"{section}: {name} / stock {ratio}, {median:.3f} s")
        if section == "save":
            compare_peaks(trainers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
