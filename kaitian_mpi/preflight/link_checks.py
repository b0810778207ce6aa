"""Verdicts on what connects the ranks, and on their hosts' clocks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from kaitian_mpi.preflight.facts import JobFacts
from kaitian_mpi.preflight.verdict import Verdict, ok, problem, warning

_SLOW_FACTOR = 3.0
_SLOW_MB_PER_SEC = 100.0  # a link of 1 Gbit/s has 118
_SLOW_LATENCY_US = 1_000.0
_MAX_SKEW_SEC = 1.0


def judge_links(job: JobFacts) -> Iterator[Verdict]:
    """Messages arrive between the ranks, about as fast everywhere."""
    working = [link for link in job.links if link.mb_per_sec is not None]
    for link in job.links:
        if link.error:
            yield problem(
                f"between {_ends(link.ranks, link.hosts)}: {link.error}",
                "check that no firewall is between the hosts, and choose the network with mpirun "
                "--mca btl_tcp_if_include",
            )
    if not working:
        return
    speeds = [link.mb_per_sec for link in working if link.mb_per_sec is not None]
    delays = [link.latency_us for link in working if link.latency_us is not None]
    usual = median(speeds)
    between_hosts = any(link.hosts[0] != link.hosts[1] for link in working)
    found = f"{len(working)} pairs of {'hosts' if between_hosts else 'ranks'}"
    figures = f"{_range(delays)} us, {_range(speeds)} MB/s"
    yield ok(f"{found if len(working) > 1 else 'one pair'}: {figures}")
    for link in working:
        if link.mb_per_sec is not None and link.mb_per_sec * _SLOW_FACTOR < usual:
            yield warning(
                f"between {_ends(link.ranks, link.hosts)}: {link.mb_per_sec:,.0f} MB/s, but the "
                f"median pair has {usual:,.0f}",
                "check that link; if it cannot be made faster, leave the host out",
            )
    if between_hosts and usual < _SLOW_MB_PER_SEC:
        yield warning(
            f"the hosts exchange {usual:,.0f} MB/s",
            "choose a faster network with mpirun --mca btl_tcp_if_include, or larger batches",
        )
    if between_hosts and median(delays) > _SLOW_LATENCY_US:
        yield warning(
            f"a message between hosts takes {median(delays):,.0f} us",
            "use hosts that are closer, or larger batches: every step waits for several messages",
        )


def judge_clocks(job: JobFacts) -> Iterator[Verdict]:
    """The hosts' clocks agree."""
    off = [
        clock for clock in job.clocks if abs(clock.skew_sec) - clock.uncertainty_sec > _MAX_SKEW_SEC
    ]
    for clock in off:
        way = "ahead of" if clock.skew_sec > 0 else "behind"
        yield warning(
            f"the clock of {clock.host} is {abs(clock.skew_sec):.3f} s {way} that of rank 0's "
            f"host (±{1e3 * clock.uncertainty_sec:.2g} ms)",
            "start a time service there (chrony): dates in logs and files mislead",
        )
    if job.clocks and not off:
        most = max(job.clocks, key=lambda clock: abs(clock.skew_sec))
        yield ok(
            f"hosts within {1e3 * abs(most.skew_sec):.3g} ms (±{1e3 * most.uncertainty_sec:.2g} ms)"
        )


def judge_networks(job: JobFacts) -> Iterator[Verdict]:
    """The hosts' networks are listed."""
    for host, ranks in job.hosts.items():
        devices = ranks[0].devices
        if devices is not None and len(job.hosts) > 1:
            shown = ", ".join(
                f"{name} {speed}".rstrip() for name, speed in devices.interconnects.items()
            )
            yield ok(shown or "no interface is up", host)


def _ends(ranks: tuple[int, int], hosts: tuple[str, str]) -> str:
    if hosts[0] == hosts[1]:
        return f"ranks {ranks[0]} and {ranks[1]}"
    return f"{hosts[0]} (rank {ranks[0]}) and {hosts[1]} (rank {ranks[1]})"


def _range(values: list[float]) -> str:
    least, most = (f"{end:,.0f}" if end >= 1 else "<1" for end in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
