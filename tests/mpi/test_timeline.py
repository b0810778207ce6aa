"""Clocks that differ between ranks, and collectives that are recorded by them."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from trace_rules import check_trace, collectives_of, largest_gap_us, read_trace

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.observe.timeline.clock import AlignedClock, Offset
from kaitian_mpi.observe.timeline.recorder import Recorder, start_recording, stop_recording
from kaitian_mpi.observe.timeline.trace_file import NAME
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.progress import Progress
from kaitian_mpi.train.timeline import Timeline, align_clocks

SECONDS_OFF = 1000.0  # by rank
MAX_ERROR_US = 20_000  # round trips take long where other programs use the cores


@pytest.fixture
def wrong_clock(world):
    """This rank's clock: minutes off, and a thousandth too fast or slow."""
    began = time.monotonic()
    speed = 1 + (world.rank - 1) * 1e-3

    def now():
        elapsed = time.monotonic() - began
        return began + SECONDS_OFF * world.rank + speed * elapsed

    return now


def on_hosts_of_their_own(world):
    infos = [dataclasses.replace(info, node=rank) for rank, info in enumerate(world.infos)]
    known = {name: getattr(world, name) for name in ("comm", "rank", "info", "device_kind")}
    return SimpleNamespace(**known, infos=infos)


def aligned(world, hosts, now):
    clock = AlignedClock()
    if world.rank == 0:
        clock.align(now(), Offset(50.0, 0.0))
    align_clocks(world.comm, hosts, clock, now)
    return clock


@pytest.mark.ranks(4)
def test_clocks_agree_after_an_alignment_within_the_error_that_is_stated(world, wrong_clock):
    # The ranks of a host have its first rank's offset.
    clock, now = aligned(world, [3, 2, 3, 2], time.monotonic), time.monotonic()
    assert abs(clock.run_time(now) - now - 50.0) <= clock.error
    assert len(set(gather_values(world.comm, clock.error))) == 2

    clock = aligned(world, range(world.size), wrong_clock)
    # On one host all ranks have the same clock, which shows what the aligned ones should.
    own = clock.run_time(wrong_clock()) - time.monotonic(), clock.error
    offsets, errors = zip(*gather_values(world.comm, own), strict=True)
    assert errors[0] == 0
    for offset, error in zip(offsets, errors, strict=True):
        assert error < MAX_ERROR_US / 1e6
        # The clocks are wrong by a thousandth, for up to a second since the alignment.
        assert abs(offset - offsets[0]) < error + 1e-3


@pytest.mark.thorough(4)
@pytest.mark.ranks(3)
def test_the_same_collective_is_at_the_same_time_on_all_ranks(world, wrong_clock, tmp_path):
    recorder = Recorder(1, now=wrong_clock)
    start_recording(recorder)
    try:
        folder = tmp_path if world.rank == 0 else None
        state = SimpleNamespace(progress=Progress(2))
        timeline = Timeline(on_hosts_of_their_own(world), folder, recorder, state)
        for step in (1, 2):
            for _ in range(3):
                sleeping_barrier(world.comm)
                if world.rank == 1:
                    time.sleep(0.1)  # the others wait for it
                dist.all_reduce(torch.ones(1 << 16))
                time.sleep(0.01)
            dist.all_reduce(torch.ones(4), async_op=True).wait()
            state.progress.step = step
            timeline.share()
        timeline.run_finished()
    finally:
        stop_recording()
    if world.rank == 0:
        trace = json.loads((tmp_path / NAME).read_text())
        assert trace == read_trace(tmp_path / NAME)
        check_trace(trace)
        collectives = collectives_of(trace)
        assert len(collectives) == 8
        numbers = [int(name.rpartition("#")[2]) for name in collectives]
        assert numbers == list(range(numbers[0], numbers[0] + 8))
        lines = [event for event in trace if event["name"] == "clocks aligned"]
        assert {line["pid"] for line in lines} == set(range(world.size))
        error_us = max(line["args"]["error_us"] for line in lines)
        assert error_us < MAX_ERROR_US
        for spans in collectives.values():
            assert [span["args"]["rank"] for span in spans] == list(range(world.size))
            assert {span["name"] for span in spans} == {"all_reduce"}
            assert {span["args"]["bytes"] for span in spans} in ({4 << 16}, {16})
            # No rank ends it before another begins it.
            assert largest_gap_us(spans) < 2 * error_us
    sleeping_barrier(world.comm)
