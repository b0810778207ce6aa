"""The relay's stages in a timeline, by the marks of a device with streams."""

import itertools
import time

import fake_device
import pytest
from test_relay import BUS, COPY_SEC, DEVICE, relayed

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.relay.copies import StreamCopies
from kaitian_mpi.observe.timeline.recorder import (
    COPY_BACK,
    COPY_OUT,
    NO_LABEL,
    Recorder,
    recorded,
    start_recording,
    stop_recording,
)

CHUNKS = 8
LANES = (COPY_OUT, COPY_BACK)
ROUNDING_SEC = 1e-6


@pytest.mark.sizes(2)
def test_copies_are_recorded_when_the_device_carries_them_out():
    recorder = Recorder(1)
    fake_device.set_bandwidth(BUS)

    began = time.monotonic()
    start_recording(recorder)
    try:
        assert recorded(lambda: relayed(StreamCopies, chunks=CHUNKS), "all_reduce", NO_LABEL, 1)()
    finally:
        stop_recording()
        fake_device.set_bandwidth()
    anchor = device_of(DEVICE).mark()
    anchor.wait()
    now = recorder.now()
    events = recorder.take_device_spans(anchor, now)
    by_lane = {lane: [each for each in events if each.lane == lane] for lane in LANES}
    for spans in by_lane.values():
        assert len(spans) == CHUNKS
        assert all(span.end - span.start > 0.9 * COPY_SEC for span in spans[:-1])
        assert all(began < span.start and span.end < now for span in spans)
        # A copy is not shown while it waits for its turn.
        assert all(b.start > a.end - ROUNDING_SEC for a, b in itertools.pairwise(spans))
    stages = zip(*by_lane.values(), strict=True)
    assert all(back.start > out.end for out, back in stages)
