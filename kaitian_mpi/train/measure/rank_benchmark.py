"""Benchmarks the user's model on every rank, and shows, writes and caches the results."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from kaitian_mpi.balance.cost_model import scores
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import show_table
from kaitian_mpi.observe.files import json_bytes, replacing
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.sample_digest import digest_samples
from kaitian_mpi.train.measure.equal_devices import are_equal_cpus, share_measurements
from kaitian_mpi.train.measure.rank_timer import (
    RankMeasurement,
    RankTimer,
    equal_share,
    max_share,
)
from kaitian_mpi.train.setup import Setup, describe_model
from kaitian_mpi.train.summary import describe_rank
from kaitian_mpi.train.task import aside

_FILE = "benchmark.json"


def benchmark_ranks(
    config: TrainingConfig,
    world: World,
    setup: Setup,
    min_batch: int = 1,
    reserved: int | None = None,
    part: str = "",
) -> list[RankMeasurement]:
    """Time forward, backward and optimizer on all ranks at once, as in training. Collective.

    Equal devices of a host share what they have measured, unless repeated rounds separate them.
    Takes at most about `--benchmark-seconds`, or no time if all ranks have cached results. The
    model can train on `min_batch` samples and more; it is not changed. `reserved` are the bytes of
    this rank that the training takes besides. `part` names what of the model is timed, if not all.
    """
    comm = world.comm
    cache = BenchmarkCache(config, world, setup, reserved, part)
    measurement = cache.read()
    gathered = gather_values(comm, (measurement is not None, world.threads))
    threads = [threads for _, threads in gathered]
    # All or none: ranks that share a host must be timed while the others compute as well.
    is_cached = all(cached for cached, _ in gathered)
    if measurement is None or not is_cached:
        timer = RankTimer(config, world, setup, min_batch, reserved)
        # The shares of equal ranks are equal at first, and follow their speed in training.
        follows_speed = config.balance == "adaptive"
        repeats = not (follows_speed and are_equal_cpus(world.infos, threads))
        sleeping_barrier(comm)
        # Ranks may share cores, so each is timed while all others compute too, as in training: a
        # rank that is done keeps computing until the last one is done.
        with agree_on_errors(comm), aside(world.device):
            try:
                measurement = timer.measure(repeats)
            finally:
                barrier = comm.Ibarrier()
            while not barrier.Test():
                timer.keep_busy()
            timer.close()
            enter_phase("comparing the benchmarks", waits=True, limited=False)
        with agree_on_errors(comm):
            cache.write(measurement)
    results = [RankMeasurement(**result) for result in gather_values(comm, asdict(measurement))]
    return share_measurements(world.infos, threads, results, equal_share(config, world.size))


def show_benchmark(
    world: World,
    results: Sequence[RankMeasurement],
    scores: Sequence[float],
    batch_sizes: Sequence[int],
) -> None:
    """Print each rank's cost and batch size, on world rank 0."""
    source = " (from --benchmark-cache)" if results[0].from_cache else ""
    columns = "rank", "group", "ms: step + sample", "varies", "memory", "computes in", "score"
    rows = [[*columns, "samples/step"]]
    for info, result, score, share in zip(world.infos, results, scores, batch_sizes, strict=True):
        cost = result.cost
        seconds = f"{1e3 * cost.alpha_sec:.1f} + {1e3 * cost.beta_sec:.2f}"
        error = result.repeat_error
        varies = "once" if error is None else f"±{error:.0%}"
        memory = str(cost.largest_micro_batch or "all")
        computes_in = f"{result.precision} {result.memory_format}"
        row = [str(info.world_rank), info.kind, seconds, varies, memory, computes_in]
        rows.append([*row, f"{score:.2f}", str(share)])
    if any(slowed := [info.slowdown for info in world.infos]):
        texts = (f"slowed {slowdown}" if slowdown else "" for slowdown in slowed)
        rows = [[*row, text] for row, text in zip(rows, ["emulated", *texts], strict=True)]
    title = f"benchmark{source}: samples per step sum to {sum(batch_sizes)}"
    show_table(world, title, rows, left=("group", "computes in", "emulated"))


def write_benchmark(world: World, setup: Setup, results: Sequence[RankMeasurement]) -> None:
    """Write benchmark.json: what was measured on each rank."""
    share = math.ceil(sum(result.batches[-1] for result in results) / len(results))
    by_rank = scores([result.cost.seconds(share) for result in results])
    ranks = [
        {
            **describe_rank(info),
            "alpha_sec": result.cost.alpha_sec,
            "beta_sec_per_sample": result.cost.beta_sec,
            "fit_error": result.fit_error,
            "repeat_error": result.repeat_error,
            "largest_micro_batch": result.largest_micro_batch,
            "seconds_by_batch": dict(zip(result.batches, result.seconds, strict=True)),
            "from_cache": result.from_cache,
            "memory_bytes": info.memory_bytes,
            "memory_format": result.memory_format,
            "precision": result.precision,
            "score": score,
            "emulated_slowdown": info.slowdown,
        }
        for info, result, score in zip(world.infos, results, by_rank, strict=True)
    ]
    setup.folder.write(_FILE, {"ranks": ranks, "emulated": is_emulated(world)})


def record_allreduce(setup: Setup, seconds: Mapping[str, float]) -> None:
    """Add the measured algorithms to benchmark.json: seconds for a step's buckets, by algorithm."""
    if seconds:
        setup.folder.write(_FILE, {**setup.folder.read(_FILE), "allreduce_sec": dict(seconds)})


def is_emulated(world: World) -> bool:
    """Return whether any device kind or slowdown of the run is emulated."""
    return any(info.emulated or info.slowdown or info.emulated_memory for info in world.infos)


class BenchmarkCache:
    """One rank's file in the folder of `--benchmark-cache`; does nothing without that flag.

    A result is valid for one host, device, local rank, number of ranks on the host, model, sample
    shape, batch limit and set of versions. Other influences on a step's time, such as another job
    on the host, are not considered.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        setup: Setup,
        reserved: int | None = None,
        part: str = "",
    ) -> None:
        task = setup.task
        self._key = {
            "host": world.info.host,
            "device": f"{world.info.device} {world.info.device_name}",
            "local_rank": world.info.local_rank,
            "ranks_on_host": sum(info.host == world.info.host for info in world.infos),
            "threads": world.threads,
            "pace": world.device_kind.pace.factor,
            "model": f"{task.name}, {describe_model(task.model)}",
            "sample": digest_samples(setup.train, 1)[0][0],
            "precision": config.precision,
            "memory_format": config.memory_format,
            **({} if reserved is None else {"reserved": reserved}),
            **({"part": part} if part else {}),
            "batches": [max_share(config), config.micro_batch_size],
            "versions": [torch.__version__, version("kaitian-mpi")],
        }
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:16]
        folder = config.benchmark_cache
        self._file = Path(folder) / f"{name}.json" if folder else None

    def read(self) -> RankMeasurement | None:
        """Return the cached result; None if there is none or the file is invalid or outdated."""
        if self._file is None:
            return None
        try:
            cached = json.loads(_read_own(self._file))
            measured = RankMeasurement(**cached["measurement"] | {"from_cache": True})
            numbers = [*measured.batches, *measured.seconds]
            positive = all(math.isfinite(number) and number > 0 for number in numbers)
            lists = measured.batches, measured.seconds, measured.rounds
            counts = {len(values) for values in lists}
            is_valid = positive and len(counts) == 1 and all(measured.rounds)
            return measured if is_valid and cached["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, measured: RankMeasurement) -> None:
        """Write a result atomically."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._file, shared=True) as file:
                file.write(json_bytes({"key": self._key, "measurement": asdict(measured)}))
        except OSError as error:
            raise UserError(
                f"--benchmark-cache {self._file.parent}: {error.strerror}; give a writable folder"
            ) from error


def _read_own(file: Path) -> str:
    """Return a file's text; raise OSError for one that another user may have written."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as opened:
        about = os.fstat(opened.fileno())
        if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
            raise PermissionError(f"{file} belongs to another user or is world-writable")
        return opened.read()
