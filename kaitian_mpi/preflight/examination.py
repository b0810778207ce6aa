"""Examines one process and its host: all that needs no other rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kaitian_mpi.preflight.collect import collect
from kaitian_mpi.preflight.facts import JobFacts, Mpi, RankFacts, Storage, devices_from_json
from kaitian_mpi.preflight.launcher_probe import examine_launcher
from kaitian_mpi.preflight.stages import Stage, StageError

_DEVICES, _STORAGE, _MPI = "devices", "run folder", "mpi"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `kaitian-doctor` was asked."""

    devices: str = "auto"
    """As `--devices`."""
    share_device: bool = False
    """As `--share-device`."""
    run_dir: str = "runs"
    """The folder whose file system is examined."""
    timeout: float = 60.0
    """Seconds that an examination may take."""


class Examination:
    """The examinations of one rank, running beside it since this was made.

    Args:
        options: what was asked.
        rank: the rank.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self._deadline = time.monotonic() + options.timeout
        self._facts = collect(socket.gethostname(), rank)
        self._stages = [
            Stage(
                _DEVICES,
                devices=options.devices,
                share=options.share_device,
                local_rank=self._facts.local_rank,
                local_size=self._facts.local_size,
                host=self._facts.host,
            )
        ]
        if self._facts.local_rank == 0:
            self._stages.append(Stage(_STORAGE, run_dir=options.run_dir))

    @property
    def first_facts(self) -> RankFacts:
        """What is known at once."""
        return self._facts

    def start_mpi(self) -> None:
        """Examine MPI in a process of its own, as a job of one rank."""
        self._stages.append(Stage(_MPI))

    def results(self) -> RankFacts:
        """Return what was found, when all of it was found or has taken too long."""
        found: dict[str, Any] = {}
        faults: dict[str, str] = {}
        for stage in self._stages:
            try:
                found[stage.name] = stage.result(self._deadline)
            except StageError as error:
                faults[stage.name] = str(error)
        return _with(self._facts, found, faults)


def _with(facts: RankFacts, found: Mapping[str, Any], faults: Mapping[str, str]) -> RankFacts:
    return replace(
        facts,
        devices=devices_from_json(found[_DEVICES]) if _DEVICES in found else None,
        storage=Storage(**found[_STORAGE]) if _STORAGE in found else None,
        mpi=Mpi(**found[_MPI]) if _MPI in found else None,
        faults=dict(faults),
    )


def examine_machine(options: Options) -> JobFacts:
    """Examine this machine, without a launcher: also where MPI or torch cannot be loaded."""
    examination = Examination(options, 0)
    examination.start_mpi()
    launcher = examine_launcher(options.timeout)
    return JobFacts(ranks=(examination.results(),), launcher=launcher)
