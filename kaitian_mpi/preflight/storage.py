"""Verdicts on the file system of the run folder."""

from __future__ import annotations

from collections.abc import Iterator

from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.verdict import Verdict, ok, problem, size_text, warning

_ROOM = 1 << 30
_SLOW_MB_PER_SEC = 20.0


def judge_storage(job: JobFacts) -> Iterator[Verdict]:
    """Results can be written, by the first rank of every host: any may have to."""
    for host, ranks in job.hosts.items():
        storage = next((facts.storage for facts in ranks if facts.storage is not None), None)
        if storage is None:
            continue
        where = f"{storage.folder} ({storage.file_system})"
        free = f"{size_text(storage.free_bytes)} free"
        if storage.error:
            yield problem(
                f"{where} cannot be written: {storage.error}, {free}",
                "give --run-dir a folder that can be written, or make room",
                host,
            )
            continue
        speed = storage.write_mb_per_sec or 0.0
        found = f"{where}: {free}, {speed:,.0f} MB/s"
        if storage.free_bytes < _ROOM:
            yield warning(
                found, "make room, or give --run-dir another folder: checkpoints need it", host
            )
        elif speed < _SLOW_MB_PER_SEC:
            yield warning(
                found, "checkpoints take long; a local disk for --run-dir is faster", host
            )
        else:
            yield ok(found, host)
