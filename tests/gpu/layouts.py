"""Layouts shard, pipeline and auto on real devices: what only these can show.

    export PYTHONPATH=benchmarks
    mpirun --with-ft ulfm -np 2 python tests/gpu/one_as_two.py tests/gpu/layouts.py nccl \
        --devices cuda:0,cuda:0
    mpirun --with-ft ulfm -np 2 python tests/gpu/layouts.py mixed --devices cuda:0,cpu

`nccl` is about two accelerators that their library connects (`one_as_two.py` makes one GPU two),
`loss` about one of them that dies in an exchange, and `mixed` about an accelerator beside a CPU.
Names of checks run these alone; `--after NAME` those that follow one. Every check prints its
verdict (see `verdicts.py`), and those after it run whatever it says; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared import stand_in
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from verdicts import (
    Memory,
    SkippedError,
    check_plain,
    delay,
    expect,
    expect_on_hardware,
    remaining,
    run_checks,
)

import kaitian_mpi
from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.balance.pipeline import Stage
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.distributed import shard_buckets
from kaitian_mpi.distributed.gathering import ParameterGathers
from kaitian_mpi.distributed.pending_parameter import PendingParameter
from kaitian_mpi.distributed.shard_reducer import ShardReducer
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.layouts.choose import measure_exchange
from kaitian_mpi.train.layouts.links import measure_links
from kaitian_mpi.train.layouts.pipeline.measure import find_facts
from kaitian_mpi.train.layouts.pipeline.runner import Runner
from kaitian_mpi.train.layouts.shard import memory_budget
from kaitian_mpi.train.layouts.shard.shards import Shards
from kaitian_mpi.train.setup import prepare_without_folder
from kaitian_mpi.train.task import Computation

IS_STAND_IN = stand_in.KIND == stand_in.STAND_IN
MB = 1 << 20
WIDTH, LAYERS = (256, 4) if IS_STAND_IN else (4096, 16)  # 64 MB a layer, 1 GB together
SAMPLES, BATCH, STEPS = 96, 24, 6 if IS_STAND_IN else 10  # more than an epoch
ROUNDS = 1 if IS_STAND_IN else 10  # of what is timed
FEW_SYNCHRONIZES = 6  # a step, if their number does not grow with the model's parameters
QUIET = {"quiet": True, "progress": "none", "parity": False, "check_every": 0, "balance": "off"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="+", help="sections or names of checks")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--after", default="", help="the check after which to begin")
    options = parser.parse_args()
    checks = [check for name in options.checks for check in SECTIONS.get(name, [BY_NAME.get(name)])]
    names = [check.__name__ for check in checks]
    if options.after in names:
        checks = checks[names.index(options.after) + 1 :]
    world = kaitian_mpi.init(devices=options.devices)
    is_good = run_checks(world, checks)
    # With a lost rank, MPI's end may hang.
    sys.stdout.flush()
    sys.stderr.flush()
    if is_smaller(world):
        os._exit(not is_good)
    dist.destroy_process_group()
    sys.exit(not is_good)


# What is trained.


class Residual(nn.Module):
    """Adds a linear layer of its input to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.layer(x).tanh()


def make_task(
    dtype: torch.dtype = torch.float64, width: int = 128 if IS_STAND_IN else 256
) -> kaitian_mpi.Task:
    """Return a training whose samples come in order, so that its batches are known."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, width), *map(Residual, [width] * 4), nn.Linear(width, 4))
    inputs = torch.randn(SAMPLES, 16, dtype=dtype)
    return kaitian_mpi.Task(
        model=model.to(dtype),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        data=TensorDataset(inputs, torch.arange(SAMPLES) % 4),
        shuffle=False,
        loss=lambda m, batch: cross_entropy(m(batch[0]), batch[1]),
        clip_norm=1.0,
    )


def weights_of_one_process(task: kaitian_mpi.Task) -> dict[str, torch.Tensor]:
    """Return the weights after the steps, on the CPU."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        begin = step * BATCH % SAMPLES
        optimizer.zero_grad()
        task.loss(model, task.data[begin : begin + BATCH]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


@contextmanager
def common_folder(world: Any) -> Iterator[Path]:
    """Yield a folder that all ranks of this host use."""
    with tempfile.TemporaryDirectory(prefix="kaitian-gpu-") as folder:
        yield Path(gather_values(world.comm, folder)[0])
        if world.size > 1 and not is_smaller(world):
            gather_values(world.comm, None)


def is_smaller(world: Any) -> bool:
    """Return whether ranks of the world have been lost since."""
    return remaining(world).size < world.size


def train(world: Any, task: kaitian_mpi.Task, **settings: Any) -> dict[str, torch.Tensor]:
    """Train on all ranks, and return the final weights. Collective."""
    with common_folder(world) as folder:
        settings = {**QUIET, "global_batch_size": BATCH, "max_steps": STEPS, "epochs": 9,
                    **settings}  # fmt: skip
        with kaitian_mpi.Training(task, run_dir=str(folder / "run"), **settings) as training:
            for _ in training:
                pass
            scaler = training._session.prepared.state.computation.scaler
            if scaler.is_enabled() and not is_smaller(world):
                scales = gather_values(world.comm, scaler.get_scale())
                assert len({*scales}) == 1, scales
        return torch.load(folder / "run/checkpoints/model.pt")


def farthest(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between weights; NaN if one is not finite."""
    differences = [(weights[name] - value).abs().max() for name, value in expected.items()]
    return float(torch.stack(differences).max())


def check_weights(world: Any, tolerance: float, task: kaitian_mpi.Task, **settings: Any) -> str:
    """Train, and compare the weights with those of one process. Collective."""
    expected = weights_of_one_process(task)
    distance = farthest(train(world, task, **settings), expected)
    return expect(distance <= tolerance, f"{distance:.1e} from one process")


@contextmanager
def in_parts(world: Any) -> Iterator[None]:
    """Have layout shard find no room for whole parameters in the block."""
    check_plain(world)
    shard_needs = memory_budget.shard_needs

    def needs_too_much(*args: Any) -> Any:
        (whole, *parts), numbers = shard_needs(*args)
        assert parts, "no parameter can be sharded"
        return [whole._replace(owned=1 << 60), *parts], numbers

    with mock.patch.object(memory_budget, "shard_needs", needs_too_much):
        yield


# Two accelerators and their library.


class Sharded:
    """A chain of large layers without bias, whose gradients and state this rank has half of."""

    def __init__(self, world: Any, width: int = WIDTH, layers: int = LAYERS) -> None:
        torch.manual_seed(3)
        chain = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = nn.Sequential(*chain).to(world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._shards = Shards(self.model, [self.optimizer])
        self._shards.assign(world, without_mirrors([1.0] * world.size))
        self.reducer = self._shards.reducer(self.model)
        self._inputs, self._part = torch.ones(8, width, device=world.device), 1 / world.size

    def step(self) -> None:
        """Do all of a step but give the other ranks the new values."""
        self.reducer.arm(self._part)
        self.model(self._inputs).square().mean().backward()
        self.reducer.finish()
        self.optimizer.step()
        self._shards.zero_gradients()


def exchange_is_measured(world: Any) -> str:
    """What `auto` takes an exchange to cost is what it takes, not what its launch does."""
    size = (1 if IS_STAND_IN else 8) * MB
    scatter, gather = measure_exchange(world, size)
    part = torch.zeros(size // 4 // world.size, device=world.device)
    whole = part.repeat(world.size)
    works = {
        "scatter": partial(dist.reduce_scatter_tensor, part, whole),
        "gather": partial(dist.all_gather_into_tensor, whole, part),
    }
    figures, is_right = [], True
    for name, cost in (("scatter", scatter), ("gather", gather)):
        seconds = max(gather_values(world.comm, median_seconds(world, works[name], ROUNDS)))
        ratio = cost.seconds(size) / seconds
        is_right &= 0.5 <= ratio <= 2
        figures.append(f"{name} {1e3 * cost.seconds(size):.2f} of {1e3 * seconds:.2f} ms")
    return expect_on_hardware(is_right, f"{', '.join(figures)} for {size / MB:.0f} MB")


def median_seconds(world: Any, work: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of what is done with a device that has nothing else to do."""
    seconds = []
    for _ in range(rounds + 2):
        world.synchronize()
        began = time.perf_counter()
        work()
        world.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def values_come_in_place(world: Any) -> str:
    """Sharing values takes no second copy of the model, nor does the sum of gradients."""
    memory = Memory(world)
    sharded = Sharded(world)
    whole = sum(parameter.nbytes for parameter in sharded.model.parameters())
    for _ in range(2):
        sharded.step()
        memory.restart()
        before = memory.allocated()
        sharded.reducer.share_values()
        sharded.reducer.check_values()
        world.synchronize()
        grown = memory.peak() - before
    memory.restart()
    before = memory.allocated()
    sharded.step()
    world.synchronize()
    in_step = memory.peak() - before
    sharded.reducer.close()
    text = f"{grown / MB:.0f} MB for sharing, {in_step / MB:.0f} MB for a step, of {whole / MB:.0f}"
    if IS_STAND_IN:  # whose few gradients are in one bucket
        return expect(grown < whole, text)
    return expect(grown < whole / 16 and in_step < whole, text)


def late_values(world: Any, mirrors: bool = False) -> str:
    """Values that come late are waited for by what uses them: it trains like one process."""
    seen: list[bool] = []
    share_values = ShardReducer.share_values

    def share_late(reducer: ShardReducer) -> None:
        if world.rank == 1:
            delay(world, 0.1)
        share_values(reducer)
        seen.append(
            any(
                isinstance(parameter, PendingParameter)
                for parameter in reducer._layout.trained.parameters
            )
        )

    with mock.patch.object(ShardReducer, "share_values", share_late):
        text = check_weights(world, 1e-10, make_task(), layout="shard", mirrors=mirrors)
    are_late = sum(map(sum, gather_values(world.comm, seen)))
    if not are_late and IS_STAND_IN:
        raise SkippedError(f"as the stand-in's parameters have a class of their own ({text})")
    return expect(are_late > 0, f"{text}; late in {are_late} of {world.size * len(seen)} steps")


def late_mirrored_values(world: Any) -> str:
    """The same where both ranks step everything."""
    return late_values(world, mirrors=True)


def late_parts(world: Any) -> str:
    """Sharded parameters that come late are waited for."""
    count = []
    start = ParameterGathers.start

    def start_late(gathers: ParameterGathers, numbers: Any, **options: Any) -> Any:
        if world.rank == 1:
            delay(world, 0.01)
        count.append(numbers)
        return start(gathers, numbers, **options)

    with in_parts(world), mock.patch.object(ParameterGathers, "start", start_late):
        text = check_weights(world, 1e-10, make_task(), layout="shard", mirrors=False)
    return expect(len(count) > STEPS, f"{text}; brought {len(count)} times")


def synchronizes_of_a_step(world: Any) -> str:
    """How often the host waits for the device in a step does not grow with the model."""
    return count_synchronizes(world, "shard")


def count_synchronizes(world: Any, layout: str) -> str:
    if IS_STAND_IN or world.infos[0].kind not in ("cuda", "rocm"):
        raise SkippedError("only CUDA counts them")
    width, layers, steps = 1536, 16, 4
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    task = kaitian_mpi.Task(
        model=model,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        data=torch.ones(64, width),
        loss=lambda m, batch: m(batch).square().mean(),
        clip_norm=1.0,
    )
    settings = {**QUIET, "global_batch_size": 16, "max_steps": 3 + steps, "epochs": 99}
    places: dict[str, int] = {}
    with kaitian_mpi.Training(task, layout=layout, mirrors=False, **settings) as training:
        for step in training:
            if step.number == 2:
                begin_counting(world)
            elif step.number == 2 + steps:
                places = end_counting(world)
    per_step = sum(places.values()) / steps
    most = ", ".join(f"{place} {n / steps:g}" for place, n in sorted(places.items(), key=by_count))
    return expect(per_step <= FEW_SYNCHRONIZES, f"{per_step:g} a step ({most or 'none'})")


def by_count(place: tuple[str, int]) -> int:
    return -place[1]


_shown: list[str] = []


def begin_counting(world: Any) -> None:
    """Note from now on where CUDA makes the host wait, besides `synchronize` itself."""
    if world.device_kind.is_host:
        return
    _shown.clear()
    warnings.simplefilter("always")
    warnings.showwarning = note_place  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("warn")


def note_place(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
    if "called a synchronizing" in str(message):
        _shown.append(f"{Path(filename).name}:{line}")


def end_counting(world: Any) -> dict[str, int]:
    if world.device_kind.is_host:
        return {}
    torch.cuda.set_sync_debug_mode("default")
    return {place: _shown.count(place) for place in dict.fromkeys(_shown)}


def parts_are_not_kept(world: Any) -> str:
    """Of sharded parameters, a forward leaves only a few whole, in fp32."""
    return what_parts_leave(world, "fp32")


def parts_are_not_kept_in_bf16(world: Any) -> str:
    """The same under autocast, whose copies of weights autograd saves."""
    check_autocast(world)
    return what_parts_leave(world, "bf16")


def what_parts_leave(world: Any, precision: str) -> str:
    memory, width = Memory(world), WIDTH
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    grown: list[int] = []

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        before = memory.allocated()
        loss = model(batch).square().mean()
        grown.append(memory.allocated() - before)
        return loss

    task = kaitian_mpi.Task(
        model=model,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
        data=torch.ones(32, width),
        loss=loss_of,
    )
    settings = {**QUIET, "global_batch_size": 8, "max_steps": 3, "precision": precision}
    with in_parts(world), kaitian_mpi.Training(
        task, layout="shard", mirrors=False, **settings
    ) as training:  # fmt: skip
        for _ in training:
            pass
    largest = width * width * 4
    text = f"{max(grown[-3:]) / MB:.0f} MB, of {LAYERS} times {largest / MB:.0f} MB"
    return expect(max(grown[-3:]) < 7 * largest, text)


def check_autocast(world: Any) -> None:
    """Skip what needs autocast if a rank's device has none."""
    available = torch.amp.is_autocast_available(world.device.type)
    if not world.device_kind.is_host and available:
        try:
            with torch.autocast(world.device.type, torch.bfloat16):
                ones = torch.ones(2, 2, device=world.device)
                available = (ones @ ones).dtype is torch.bfloat16
        except Exception:  # the stand-in may say that it has autocast, and have no kernels for it
            available = False
    if not all(gather_values(world.comm, available)):
        raise SkippedError("torch has no autocast for this device")


# One of two accelerators dies.

GATHERS = [(dist, "all_gather"), (shard_buckets, "all_gather_into")]
"""What may bring the owners' values."""


def a_loss_while_values_come(world: Any) -> str:
    """A rank that dies in an exchange leaves no garbage: the other trains what one process does."""
    share_values = ShardReducer.share_values
    shared: list[int] = []

    def dies_after(gather: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = gather(*args, **kwargs)
            if len(shared) == 4 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return work

        return call

    def share(reducer: ShardReducer) -> None:
        shared.append(1)
        if world.rank == 1:
            delay(world, 0.2 if len(shared) == 4 else 0.0)
        with ExitStack() as patches:
            for place, name in GATHERS:
                if hasattr(place, name):
                    call = dies_after(getattr(place, name))
                    patches.enter_context(mock.patch.object(place, name, call))
            share_values(reducer)

    with mock.patch.object(ShardReducer, "share_values", share):
        text = check_weights(world, 1e-10, make_task(), layout="shard", mirrors=True)
    return expect(is_smaller(world), f"{text}; one of {world.size} ranks lost")


# An accelerator and a CPU.


def shard_in_both_kinds(world: Any) -> str:
    """Layout shard is exact across kinds."""
    return check_weights(world, 1e-10, make_task(), layout="shard", mirrors=False)


def parts_in_both_kinds(world: Any) -> str:
    """So it is with sharded parameters."""
    with in_parts(world):
        return check_weights(world, 1e-10, make_task(), layout="shard", mirrors=False)


def pipeline_in_both_kinds(world: Any) -> str:
    """Layout pipeline is exact across kinds."""
    check_plain(world)
    return check_weights(world, 1e-10, make_task(), layout="pipeline")


def layouts_in_fp16(world: Any) -> str:
    """With fp16, the ranks' scales are alike, and what they train is finite and near one's own."""
    check_autocast(world)
    check_plain(world)
    figures = []
    for layout in ("shard", "pipeline"):
        task = make_task(torch.float32)
        expected = weights_of_one_process(task)
        weights = train(world, task, layout=layout, mirrors=False, precision="fp16")
        figures.append((layout, farthest(weights, expected)))
    text = ", ".join(f"{layout} {far:.1e} from fp32" for layout, far in figures)
    return expect(all(far < 0.05 for _, far in figures), text)


def synchronizes_of_a_stage(world: Any) -> str:
    """How often the host waits in a step of a pipeline does not grow with the model."""
    return count_synchronizes(world, "pipeline")


def sending_does_not_wait(world: Any) -> str:
    """A message's sender goes on while its device still computes what is sent."""
    size = (1 if IS_STAND_IN else 32) * MB
    tensor, seconds = torch.ones(size, dtype=torch.uint8, device=world.device), []
    for _ in range(3):
        if world.rank == 0:
            world.synchronize()
            delay(world, 0.1)
            began = time.perf_counter()
            work = dist.isend(tensor, 1)
            seconds.append(time.perf_counter() - began)
            work.wait()
        elif world.rank == 1:
            dist.recv(tensor, 0)
    took = min(gather_values(world.comm, min(seconds, default=0.0))[:1])
    return expect_on_hardware(
        took < 5e-3, f"isend of {size / MB:.0f} MB returns after {1e3 * took:.1f} ms"
    )


def hops_are_predicted(world: Any) -> str:
    """A pipeline's messages take what was measured of the link."""
    size = (1 if IS_STAND_IN else 32) * MB
    kinds = sorted({info.kind for info in world.infos})
    if len(kinds) != 2:
        raise SkippedError("needs two kinds of devices")
    hop = measure_links(world)[" ".join(kinds)]
    tensor = torch.ones(size, dtype=torch.uint8, device=world.device)

    def there_and_back() -> None:
        steps = [dist.send, dist.recv]
        for step in steps if world.rank == 0 else steps[::-1]:
            step(tensor, 1 - world.rank)

    seconds = median_seconds(world, there_and_back, 5) / 2
    predicted = hop.latency_sec + size * hop.busy_sec
    text = f"{1e3 * predicted:.1f} ms predicted, {1e3 * seconds:.1f} ms measured"
    text += f" for {size / MB:.0f} MB"
    return expect_on_hardware(1 / 1.5 <= predicted / seconds <= 1.5, text)


def casts_are_shared(world: Any) -> str:
    """The micro-batches in flight of a stage share the copies that autocast makes of weights."""
    check_autocast(world)
    memory, width, layers, count = Memory(world), 2048 // (8 if IS_STAND_IN else 1), 4, 6
    torch.manual_seed(1)
    chain = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    task = kaitian_mpi.Task(
        model=nn.Sequential(*chain, nn.Linear(width, 4)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
        data=[0],
        loss=lambda m, batch: cross_entropy(m(batch[0]), batch[1]),
    )
    stages = [Stage(0, layers, (0,), (1.0,)), Stage(layers, layers + 1, (1,), (1.0,))]
    task.model.to(world.device)
    computation = Computation(world.device, "bf16", "contiguous")
    seen: list[tuple[bool, int]] = []
    runner = Runner(
        task, [*task.model], computation, stages, world.rank, 3,
        waits=lambda what: nullcontext(),
        begins=lambda is_forward: seen.append((is_forward, memory.allocated())),
    )  # fmt: skip
    batch = torch.randn(4, width), torch.arange(4)
    for _ in range(2):
        seen.clear()
        own = runner.rank_numbers(count)
        placed = {number: computation.place(batch) for number in own}
        runner.train(count, placed, dict.fromkeys(own, 1 / count), range(count))
    forwards = next(n for n, (is_forward, _) in enumerate(seen) if not is_forward)
    sizes = [size for _, size in seen[: forwards + 1]]
    # The first one makes the copies.
    grown = (sizes[-1] - sizes[1]) / (len(sizes) - 2) if len(sizes) > 2 else 0.0
    weights = sum(parameter.nbytes for layer in chain for parameter in layer.parameters())
    text = f"{grown / MB:.2f} MB a micro-batch, {forwards} in flight, {weights / MB:.0f} MB weights"
    found = gather_values(world.comm, [text, grown < 0.1 * weights])[0]
    return expect(found[1], found[0])


class Whole(nn.Module):
    """A model whose layers nobody can see from outside."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *args: Any) -> Any:
        return self.chain(*args)


def gpt_task() -> kaitian_mpi.Task:
    """Return the training of the GPT of examples/large_gpt.py, of 100 million parameters."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from large_gpt import loss_of, make_model

    width, blocks, context = (64, 2, 16) if IS_STAND_IN else (1024, 8, 64)
    torch.manual_seed(0)
    return kaitian_mpi.Task(
        model=make_model(width, blocks, 128, context, False),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4),
        data=TensorDataset(torch.randint(128, (64, context + 1))),
        loss=loss_of,
    )


def measured(world: Any, layout: str) -> Any:
    """Return the settings, the task and what the layers take on each rank. Collective."""
    check_plain(world)
    seconds = stand_in.BENCHMARK_SEC if IS_STAND_IN else 6.0
    config = TrainConfig(layout=layout, global_batch_size=64, benchmark_seconds=seconds, quiet=True)
    setup = prepare_without_folder(lambda world: gpt_task(), config, world)
    return config, setup, find_facts(config, setup, world)


def layers_are_measured(world: Any) -> str:
    """The layers' times add up to the chain's."""
    _, setup, facts = measured(world, "pipeline")
    own = facts.by_place[world.info.place]
    task, count = setup.task, 32
    batch = Computation(world.device, "fp32", "contiguous").place(setup.train[list(range(count))])
    model = copy.deepcopy(task.model).to(world.device)

    def forward_and_backward() -> None:
        task.loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    seconds = median_seconds(world, forward_and_backward, ROUNDS)
    predicted = sum(own.fixed_sec) + count * sum(own.sample_sec)
    pairs = gather_values(world.comm, [predicted, seconds])
    text = ", ".join(
        f"{info.kind} {1e3 * a:.1f} ms in layers, {1e3 * b:.1f} ms at once"
        for info, (a, b) in zip(world.infos, pairs, strict=True)
    )
    ratios = [a / b for info, (a, b) in zip(world.infos, pairs, strict=True) if info.kind != "cpu"]
    return expect_on_hardware(all(1 / 1.3 <= ratio <= 1.3 for ratio in ratios), text)


def room_is_what_is_free(world: Any) -> str:
    """What trials have left in the allocator's cache does not count as used."""
    config, setup, _ = measured(world, "auto")
    before, _ = memory_budget.find_memory_budget(setup, config, world)
    world.device_kind.release_cached_memory()
    after, _ = memory_budget.find_memory_budget(setup, config, world)
    by_kind = [
        (info.kind, before.by_place[info.place], after.by_place[info.place]) for info in world.infos
    ]
    text = ", ".join(f"{kind} {a / 1e9:.2f} and {b / 1e9:.2f} GB" for kind, a, b in by_kind)
    is_right = all(abs(a / b - 1) <= 0.05 for kind, a, b in by_kind if kind != "cpu" and b)
    return expect_on_hardware(is_right, f"{text} before and after emptying it")


SECTIONS: dict[str, list[Callable[[Any], str]]] = {
    "nccl": [
        exchange_is_measured, values_come_in_place, late_values, late_mirrored_values, late_parts,
        synchronizes_of_a_step, parts_are_not_kept, parts_are_not_kept_in_bf16,
    ],
    "loss": [a_loss_while_values_come],
    "mixed": [
        shard_in_both_kinds, parts_in_both_kinds, pipeline_in_both_kinds, layouts_in_fp16,
        casts_are_shared, synchronizes_of_a_stage, layers_are_measured, room_is_what_is_free,
        hops_are_predicted, sending_does_not_wait,
    ],
}  # fmt: skip
BY_NAME = {check.__name__: check for checks in SECTIONS.values() for check in checks}

if __name__ == "__main__":
    main()
