"""Timelines: what is recorded, when clocks are aligned, and the file."""

import itertools
import json
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from test_metrics import reading
from trace_rules import check_trace, read_trace, spans_of

from kaitian_mpi.distributed.relay.copies import Copies
from kaitian_mpi.distributed.relay.relay import Slots, exchange_in_chunks
from kaitian_mpi.observe.reading import Event
from kaitian_mpi.observe.timeline import recorder, trace_file
from kaitian_mpi.observe.timeline.clock import AlignedClock, Offset, RoundTrip, estimate_offset
from kaitian_mpi.observe.timeline.recorder import (
    COLLECTIVES,
    EXCHANGE,
    MAIN,
    Recorder,
    is_sampled,
    part,
    recorded,
)
from kaitian_mpi.observe.timeline.trace_file import NAME, TimelineFile, TimelineSink
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.step_times import StepClock

GROUP = recorder.GroupLabel("0", "a1b2")


def test_clocks_are_aligned_by_the_shortest_round_trips_and_interpolated_between_them():
    late = RoundTrip(sent=1.0, answered=101.9, received=2.0)
    quick = RoundTrip(sent=3.0, answered=103.0015, received=3.002)
    offset = estimate_offset([late, quick, late])
    assert offset.seconds == pytest.approx(100.0005)
    assert offset.error == pytest.approx(0.001)  # half of the round trip
    clock = AlignedClock()
    clock.align(10.0, Offset(5.0, 0.1))
    assert [clock.run_time(time) for time in (0.0, 12.0)] == [5.0, 17.0]
    clock.align(20.0, Offset(6.0, 0.2))
    clock.align(40.0, Offset(6.0, 0.0))
    times = [clock.run_time(time) for time in (0.0, 10.0, 15.0, 20.0, 30.0, 50.0)]
    assert times == [5.0, 15.0, 20.5, 26.0, 36.0, 56.0]


def test_the_first_steps_and_each_tenth_are_recorded_and_memory_is_bounded():
    chosen = [step for step in range(1, 10_001) if is_sampled(step)]
    assert chosen[:13] == [*range(1, 11), 20, 30, 40]
    assert {b - a for a, b in itertools.pairwise(chosen) if 3000 < a < 5900} == {20}
    assert {b - a for a, b in itertools.pairwise(chosen) if a > 6100} == {40}
    assert sum(is_sampled(step) for step in range(0, 10_000_000, 10)) < 3000
    # Or every n-th, if that is asked for.
    assert [step for step in range(1, 13) if is_sampled(step, 4)] == [4, 8, 12]
    assert all(is_sampled(step, 1) for step in range(1, 100))
    made = Recorder(1, capacity=3)
    for _ in range(5):
        made.add(MAIN, "forward", 0.0, 1.0)
    assert (len(made.take()), made.dropped) == (3, 2)
    for _ in range(2000):  # the batches of a long evaluation
        made.enter_phase("evaluation", None)
        made.take()
    assert made.dropped == 2 + 1500
    for step in (1, 2):
        made.enter_phase("forward", step)
    assert [event.name for event in made.take()] == ["forward"]


@contextmanager
def recording(every=1, **options):
    made = Recorder(every, **options)
    recorder.start_recording(made)
    try:
        yield made
    finally:
        recorder.stop_recording()


def test_phases_of_sampled_steps_and_outside_of_steps_are_recorded():
    clock = [0.0]
    with recording(2, now=lambda: clock[0]) as made:
        for now, phase, step in (
            *((1, "loading the dataset", None), (2, "forward", 2), (4, "forward", 3)),
            *((7, "forward", 4), (8, "evaluation", None), (9, "forward", 5)),
        ):
            clock[0] = now
            enter_phase(phase, step=step)
    assert [(event.lane, event.name, event.start, event.end) for event in made.take()] == [
        *((MAIN, "loading the dataset", 1, 2), (MAIN, "forward", 2, 4)),
        *((MAIN, "forward", 7, 8), (MAIN, "evaluation", 8, 9)),
    ]
    assert made.take() == []


def test_a_collective_is_recorded_where_it_is_carried_out_with_its_parts():
    def call():
        made.annotate(algorithm="leader")
        with part("wait"):
            pass
        with part("exchange", EXCHANGE, bytes=8):
            pass
        raise ValueError("no")

    with recording(2) as made:
        enter_phase("backward", step=2)
        started = recorded(call, "all_reduce", GROUP, 7, rank=1, ranks=4, bytes=8)
        enter_phase("forward", step=3)  # not recorded; the collective is of step 2
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="no"):
            pool.submit(started).result()
        events = [event for event in made.take() if event.lane != MAIN]
        assert [(event.lane, event.name) for event in events] == (
            [(COLLECTIVES, "wait"), (EXCHANGE, "exchange"), (COLLECTIVES, "all_reduce")]
        )
        assert events[-1].args == {
            **{"number": 7, "group": "0", "collective": "a1b2#7", "rank": 1, "ranks": 4},
            **{"bytes": 8, "algorithm": "leader"},
        }
        wait, exchange, whole = (event[2:4] for event in events)
        assert whole[0] <= wait[0] <= wait[1] <= exchange[0] <= exchange[1] <= whole[1]
        assert recorded(call, "all_reduce", GROUP, 8) is call
        with part("wait"):
            pass
        assert (made.take(), made.collective_lane) == ([], None)


class DeviceMark(NamedTuple):
    time: float

    def is_reached(self):
        return True

    def wait(self):
        pass

    def seconds_since(self, earlier):
        return self.time - earlier.time


def test_forward_and_backward_of_an_accelerator_are_recorded_by_its_marks():
    with recording(2, now=lambda: 108.0) as made:
        for step in (1, 2):
            enter_phase("forward", step=step)
            # Its own clock goes on by a second at each mark.
            mark = map(DeviceMark, itertools.count(1.0)).__next__
            clock = StepClock(SimpleNamespace(is_host=False, mark=mark))
            clock.start()
            for phase in (clock.BACKWARD, clock.FORWARD, clock.BACKWARD):
                clock.enter(phase)
            for _ in range(2):
                clock.gradients_ready()
            clock.gradients_summed()
            clock.stop()
    events = made.take_device_spans(lambda: DeviceMark(8.0))
    assert [(event.name, event.start, event.end) for event in events] == [
        *(("forward", 101, 102), ("backward", 102, 103), ("forward", 103, 104)),
        *(("backward", 104, 106), ("the sum of gradients", 106, 107), ("the optimizer", 107, 108)),
    ]


def test_the_relay_records_the_stages_of_each_chunk():
    tensor = torch.ones(32)

    def call():
        exchange_in_chunks(tensor.split(8), lambda t: t.mul_(2), Copies(), Slots(pins=False))

    with recording() as made:
        recorded(call, "all_reduce", GROUP, 1)()
    assert tensor.tolist() == [2.0] * 32
    lanes = [(event.lane, event.args.get("bytes")) for event in made.take()]
    for stage in ("relay: copy out", "relay: MPI", "relay: copy back"):
        assert lanes.count((stage, 32)) == 4


def some_lines(rank=0, start=1.0):
    clock, made = AlignedClock(), Recorder(1)
    clock.align(0.0, Offset(0.0, 2e-6))
    args = {"collective": "0#1", "rank": rank, "bytes": 4, "loss": math.nan}
    made.add(MAIN, "forward", start, start + 1, {"step": 1})
    made.add(COLLECTIVES, "all_reduce", start, start + 0.5, args)
    events = trace_file.process_events(rank, f"rank {rank}", rank)
    events += trace_file.status_events(rank, start, clock, 3)
    return trace_file.encode(events + trace_file.ChromeLanes(rank).trace(made.take(), clock))


@pytest.fixture
def file(tmp_path):
    """A timeline with the lines of two ranks."""
    file = TimelineFile(tmp_path, origin=1000.0)
    file.append(some_lines(0))
    file.append(some_lines(1))
    return file


def test_the_file_is_a_valid_trace_with_and_without_its_end(file, tmp_path):
    trace = read_trace(tmp_path / NAME)
    check_trace(trace)
    file.finish()
    assert json.loads((tmp_path / NAME).read_text())[:-1] == trace
    assert {span["pid"] for span in spans_of(trace)} == {0, 1}
    assert [event["ph"] for event in trace if event.get("cat") == "collective"] == ["s", "f"]
    assert any("3 events are missing" in event["name"] for event in trace)


@pytest.mark.parametrize("ending", ["finished", "cut", "complete line"])
def test_a_later_job_continues_the_file_or_renames_another(file, tmp_path, ending):
    path = tmp_path / NAME
    whole = read_trace(path)
    if ending == "finished":
        file.finish()
    elif ending == "cut":
        with path.open("ab") as half:
            half.write(b'{"name":"forward","ph":"X","ts":12')
    later = TimelineFile(tmp_path, origin=5000.0)
    assert (later.origin, read_trace(path)) == (1000.0, whole)
    later.append(some_lines(2))
    check_trace(read_trace(path))
    path.write_text("not a timeline\n")
    assert TimelineFile(tmp_path, origin=6000.0).origin == 6000.0
    check_trace(read_trace(path))
    assert (tmp_path / f"{NAME}.old").read_text() == "not a timeline\n"


def test_a_full_disk_is_reported_once_and_leaves_a_valid_file(file, tmp_path, monkeypatch, caplog):
    before = read_trace(tmp_path / NAME)
    (tmp_path / "full").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), monkeypatch.context() as context:
        context.setattr(file, "_path", tmp_path / "full")
        file.append(some_lines(1))
        file.append(some_lines(1))
    (message,) = caplog.messages
    assert "No space left on device; training continues" in message
    assert read_trace(tmp_path / NAME) == before


def test_readings_and_events_become_counters_and_lines():
    made = Recorder(1)
    made.clock.align(made.now(), Offset(-made.now(), 0.0))
    sink = TimelineSink(made)
    now = time.time() + 5
    first = reading(3, time=now, loss=math.inf, samples_per_sec=100.0)
    sink.on_reading(first)
    sink.on_reading(replace(first, loss=2.0))
    sink.on_event(Event(step=3, time=now, kind="slow_end", text="rank 2 recovered", ranks=[2]))
    *counters, line = trace_file.ChromeLanes(0).trace(made.take(), made.clock)
    assert [(each["ph"], each["pid"], each["args"]) for each in counters] == [
        ("C", 1_000_000, {"samples/s": 100.0}),
        ("C", 0, {"batch size": 3}),
        ("C", 2, {"batch size": 5}),
        # A batch size that has not changed is not repeated.
        ("C", 1_000_000, {"samples/s": 100.0}),
        ("C", 1_000_000, {"loss": 2.0}),
    ]
    assert (line["ph"], line["s"], line["name"]) == ("i", "g", "slow end (step 3)")
    assert line["args"]["text"] == "rank 2 recovered"
    assert all(abs(each["ts"] - 5e6) < 1e5 for each in (*counters, line))
