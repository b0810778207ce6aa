"""Caches benchmark results from one job to the next."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import json_bytes, replacing
from kaitian_mpi.train.data.sample_digest import digest_samples
from kaitian_mpi.train.measure.rank_timer import RankMeasurement, Workload, max_share
from kaitian_mpi.train.setup import describe_model


class BenchmarkCache:
    """One rank's file in the folder of `--benchmark-cache`; does nothing without that flag.

    A result is valid for one host, device, local rank, number of ranks on the host, model, sample
    shape, batch limit and set of versions. Other influences on a step's time, such as another job
    on the host, are not considered.
    """

    def __init__(self, workload: Workload) -> None:
        config, world, setup = workload.config, workload.world, workload.setup
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
            "batches": [max_share(config), config.micro_batch_size],
            "versions": [torch.__version__, version("kaitian-mpi")],
        }
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:16]
        self._file = (
            Path(config.benchmark_cache) / f"{name}.json" if config.benchmark_cache else None
        )

    def read(self) -> RankMeasurement | None:
        """Return the cached result; None if there is none or the file is invalid or outdated."""
        if self._file is None:
            return None
        try:
            cached = json.loads(_read_own(self._file))
            measured = RankMeasurement(**cached["measurement"])
            is_valid = cached["key"] == self._key and _is_valid(measured)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return replace(measured, from_cache=True) if is_valid else None

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
    """Return a file's text; raise OSError for a file that another user may have written.

    The folder may be in a location shared by all users.
    """
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as opened:
        about = os.fstat(opened.fileno())
        if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
            raise PermissionError(f"{file} belongs to another user or is world-writable")
        return opened.read()


def _is_valid(measured: RankMeasurement) -> bool:
    numbers = [*measured.batches, *measured.seconds]
    positive = all(math.isfinite(number) and number > 0 for number in numbers)
    return positive and len(measured.batches) == len(measured.seconds) > 0
