"""The relay on accelerators with streams: values, overlap, memory; and what each wait is for."""

import itertools
import time

import fake_device
import fake_kinds  # noqa: F401 - makes torch know the device type
import pytest
import torch
import torch.distributed as dist
from choices import by_default
from collective_cases import agree
from fake_device import Stream, current_stream, on_device, synchronizations, values
from mpi_session import mostly_by_leader
from worlds import mostly_in_one_kind, mostly_in_several_kinds

from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed import long_messages
from kaitian_mpi.distributed.collectives import rounds, staging
from kaitian_mpi.distributed.gradients import sum_gradients
from kaitian_mpi.distributed.relay import chunking
from kaitian_mpi.distributed.relay.chunking import COUNT
from kaitian_mpi.distributed.relay.copies import StreamCopies
from kaitian_mpi.distributed.relay.relay import Slots, exchange_in_chunks
from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.observe.timeline import recorder as timeline

CHUNK = 1_000  # float32 values
COPY_SEC = 4e-3
BUS = 4 * CHUNK / COPY_SEC  # bytes a second
BUSY_SEC = 0.5  # for which a busy machine does not keep a process from running

pytestmark = pytest.mark.sizes(2)


@pytest.fixture(autouse=True)
def as_fast_as_memory():
    yield
    fake_device.set_bandwidth()


class Reached:
    def synchronize(self):
        pass


_out = StreamCopies.copy_out
MISTAKES = {
    "the host reads before its event": {"copy_out": lambda *a: _out(*a) and Reached()},
    "a buffer is reused too early": {"copy_out": lambda *a: _out(*a[:3], None)},
    "later work does not wait": {"end": lambda copies: None},
    "copies do not wait for earlier work": {"begin": lambda copies, tensor: None},
}


def relayed(copies, *, chunks=8, exchange_sec=0.0, late_sec=10 * COPY_SEC, noted=lambda *_: None):
    """Return whether a tensor is doubled in host memory."""
    length = chunks * CHUNK - 1
    content = torch.arange(length, dtype=torch.float32)

    def exchange(host):
        began = time.perf_counter()
        host.mul_(2)
        time.sleep(exchange_sec)
        noted(began, time.perf_counter())

    with fake_device.stream(Stream()):
        tensor, gradient = on_device(torch.zeros(length)), on_device(content)
        current_stream().give(lambda: time.sleep(late_sec))
        tensor.add_(gradient)  # what computes the gradient
        exchange_in_chunks(tensor.split(CHUNK), exchange, copies_by(copies), Slots(pins=True))
        tensor.add_(1)  # what uses it
        result = values(tensor)
    return torch.equal(result, content * 2 + 1)


def copies_by(kind):
    device = fake_device.current()
    return kind(torch.get_device_module(device), device)


@pytest.mark.parametrize("back", [BUS, BUS / 4])
@pytest.mark.parametrize("chunks", [1, 2, COUNT, COUNT + 1, 11])
def test_every_chunk_is_exchanged_and_copied_back(back, chunks):
    fake_device.set_bandwidth(BUS, back)
    assert relayed(StreamCopies, chunks=chunks)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_without_any_of_its_waits_the_relay_is_wrong(mistake):
    fake_device.set_bandwidth(BUS, BUS / 4)
    assert relayed(StreamCopies)
    mistaken = type("Mistaken", (StreamCopies,), mistake)
    # Where other programs use the cores, a copy may be late enough for a mistake not to show.
    assert not all(relayed(mistaken, late_sec=BUSY_SEC) for _ in range(20))


def test_copies_in_both_directions_and_the_exchange_overlap(monkeypatch):
    """Whether they do, not for how long: that benchmarks/relay.py measures."""

    class HalfDuplex(StreamCopies):
        def __init__(self, module, device):
            super().__init__(module, device)
            self.back = self.out

    spans = {"out": [], "exchange": [], "back": []}
    real_copy = fake_device.CopyEngine.copy

    def copy(engine, target, source):
        began = time.perf_counter()
        real_copy(engine, target, source)
        direction = "out" if engine is fake_device.engines["out"] else "back"
        spans[direction].append((began, time.perf_counter()))

    def overlaps(one, other):
        return sum(a < d and c < b for a, b in spans[one] for c, d in spans[other])

    monkeypatch.setattr(fake_device.CopyEngine, "copy", copy)
    fake_device.set_bandwidth(BUS)
    noted = lambda *span: spans["exchange"].append(span)  # noqa: E731
    options = {"chunks": 16, "exchange_sec": COPY_SEC, "late_sec": 0, "noted": noted}
    assert relayed(StreamCopies, **options)
    pairs = list(itertools.combinations(spans, 2))
    assert min(overlaps(*pair) for pair in pairs) >= 4
    for recorded in spans.values():
        recorded.clear()
    assert relayed(HalfDuplex, **options)
    assert overlaps("out", "back") == 0


def test_an_exchange_that_fails_leaves_no_copy_behind():
    """A retry writes to the tensor again, on the stream that computes."""
    fake_device.set_bandwidth(BUS, BUS / 4)
    copies, slots, calls = copies_by(StreamCopies), Slots(pins=True), []

    def exchange(host):
        calls.append(host.mul_(2))
        if len(calls) == 3:
            raise ConnectionError

    with fake_device.stream(Stream()):
        tensor = on_device(torch.ones(8 * CHUNK))
        with pytest.raises(ConnectionError):
            exchange_in_chunks(tensor.split(CHUNK), exchange, copies, slots)
        tensor.fill_(5)
        assert set(values(tensor).tolist()) == {5.0}
        copies.back.synchronize()
        assert set(values(tensor).tolist()) == {5.0}
        exchange_in_chunks(tensor.split(CHUNK), lambda host: host.mul_(2), copies, slots)
        assert set(values(tensor).tolist()) == {10.0}


def test_slots_are_allocated_once_in_ordinary_memory_if_need_be(caplog, monkeypatch):
    slots = Slots(pins=False)
    assert slots.provide(2, 100) == 2
    assert slots.provide(9, 100) == COUNT
    memory = {slots.take().memory.data_ptr() for _ in range(20)}
    assert len(memory) == COUNT
    assert slots.provide(3, 40) == COUNT
    assert {slots.take().memory.data_ptr() for _ in range(20)} == memory
    assert slots.take().memory.nbytes == 100
    assert slots.provide(1, 101) == 1
    assert slots.take().memory.nbytes == 101
    original, given = torch.empty, []

    def empty(*sizes, pin_memory=False, **options):
        given.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with …")
        return original(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    Slots(pins=True).provide(2, 1 << 20)
    assert given == [True, False, False]
    assert "no page-locked memory for the relay (CUDA error: out of memory)" in caplog.text
    assert len(caplog.records) == 1


@mostly_by_leader()
def test_memory_is_bounded_and_the_sum_right(world, device_of, algorithm):
    before, world.communication.relay_memory_mb = world.communication.relay_memory_mb, 1
    for length in (300_001, 70_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            content = (torch.arange(length) % 5).to(dtype)
            tensor = device_of(content * (world.rank + 1))
            dist.all_reduce(tensor)
            assert torch.equal(values(tensor), content * 3), (length, dtype)
    for _, slots in dist.group.WORLD.relay._paths.values():
        assert slots.provide(0, 0) * slots.take().memory.nbytes <= 1 << 20
    world.communication.relay_memory_mb = before


@mostly_in_several_kinds
def test_memory_is_bounded_in_rounds_too(world, device_of, monkeypatch):
    """By the least that any rank allows, as their rounds are alike."""
    monkeypatch.setattr(world.communication, "relay_memory_mb", 1 + world.rank)
    monkeypatch.setattr(staging, "MAX_PINNED_BYTES", 5000)
    group = dist.new_group()
    content = torch.arange(1 << 20).view(world.size, -1)
    received = device_of(torch.zeros_like(content))
    dist.all_to_all_single(received, device_of(content), group=group)
    assert torch.equal(values(received), content[world.rank].expand_as(content))
    gathered = device_of(torch.zeros_like(content))
    dist.all_gather_single(gathered, device_of(content[world.rank]), group)
    assert torch.equal(values(gathered), content)
    for _, slots in [] if group.uses_library else group.relay._paths.values():
        assert slots.provide(0, 0) * slots.take().memory.nbytes <= 1 << 20
    dist.destroy_process_group(group)


@pytest.mark.sizes(2, 3)
def test_gradients_alone_cross_as_bf16(world, device_of, algorithm):
    world.communication.relay_dtype = "bf16"
    generator = torch.Generator().manual_seed(7)
    rank_rows = torch.randn(world.size, 200_003, generator=generator)
    exact = rank_rows.sum(0)
    for length, is_gradient in ((200_003, True), (200_003, False), (16_384, True)):
        tensor = device_of(rank_rows[world.rank, :length].clone())
        if is_gradient:
            sum_gradients(tensor, in_background=True).wait()
        else:
            dist.all_reduce(tensor)
        assert agree(world, tensor)
        error = (values(tensor) - exact[:length]).abs().max().item()
        crossed = is_gradient and length > 16_384 and len(world.groups) > 1
        # Three numbers up to 4 are rounded to 8 bits, and so is their sum.
        least, most = (1e-3, 0.06) if crossed else (-1, 1e-5)
        assert least < error <= most
    world.communication.relay_dtype = "fp32"


def test_wait_does_not_wait_for_the_last_copy_back(world, device_of):
    dist.group.WORLD.host.algorithm = "leader"
    on_host = world.info.kind == "cpu"
    tensor = device_of(torch.ones(200_000))
    dist.all_reduce(tensor)  # which measures
    fake_device.set_bandwidth(float("inf"), 200_000 * 4 / 0.2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed() == on_host
    tensor.add_(1)  # on the current stream, which waits
    assert set(values(tensor).tolist()) == {5.0}
    assert work.is_completed()


@mostly_in_one_kind
def test_a_long_message_passes_through_page_locked_memory(world, device_of):
    content = torch.arange(staging.MAX_PINNED_BYTES // 4 + 1001.0)
    synchronizations.clear()
    for source in (0, 1):
        tensor = device_of(content if world.rank == source else torch.zeros_like(content))
        (dist.isend if world.rank == source else dist.irecv)(tensor, 1 - world.rank).wait()
        assert torch.equal(values(tensor), content)
    waits = {wait.name for wait in synchronizations if wait.thread.startswith("kaitian-messages")}
    assert not waits
    rings = dist.group.WORLD._mailbox._buffers._idle
    assert all(len(buffers) == 1 for buffers in rings.values())


@pytest.fixture
def group_with_long_messages(world, monkeypatch):
    """A group in which all but the shortest messages go in pieces."""
    monkeypatch.setattr(staging, "MAX_PINNED_BYTES", 1000)
    monkeypatch.setattr(long_messages, "_PIECE_BYTES", 256)
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


@mostly_in_several_kinds
@pytest.mark.parametrize("dtype", by_default([torch.bfloat16, torch.complex128], [torch.bfloat16]))
def test_messages_in_pieces_keep_their_order_beside_others(
    world, device_of, group_with_long_messages, dtype
):
    """Of one tag, as MPI does; messages of other tags pass those that wait."""
    group, late = group_with_long_messages, not world.rank
    content = (torch.arange(7 * 999) % 113).to(dtype).view(7, 999)
    sent = [(content, 1), (content[0, :5], 1), (content + 1, 2), (content.t(), 1), (content * 2, 1)]
    for source in (0, 1):
        if world.rank == source:
            if late:
                time.sleep(0.02)
            works = [dist.isend(device_of(t), 1 - source, group, tag) for t, tag in sent]
        else:
            got = [device_of(torch.zeros_like(t)) for t, _ in sent]
            got[3] = device_of(torch.zeros_like(content)).t()
            order = [2, 0, 1, 3, 4]
            works = [
                dist.irecv(got[n], None if n == 3 else source, group, sent[n][1]) for n in order
            ]
        for work in works:
            work.wait()
        if world.rank != source:
            assert works[3].source_rank() == source
            for (tensor, _), received in zip(sent, got, strict=True):
                assert torch.equal(values(received), tensor)


@mostly_in_one_kind
@pytest.mark.parametrize(
    "lengths", [(900, 1200), (1200, 900), (900, 9), (9, 900), (1200, 10), (90, 100), (100, 90)]
)
def test_messages_of_unlike_sizes_are_refused(world, device_of, group_with_long_messages, lengths):
    tensor = device_of(torch.zeros(lengths[world.rank]))
    if world.rank == 0:
        dist.isend(tensor, 1, group_with_long_messages)
    else:
        with pytest.raises(CollectiveError, match="different sizes"):
            dist.recv(tensor, 0, group_with_long_messages)
    world.comm.Barrier()


@mostly_in_several_kinds
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("dtype", by_default([torch.float32, torch.float16], [torch.float16]))
def test_a_long_reduce_scatter_copies_pieces_while_others_are_exchanged(world, device_of, dtype):
    lengths = [10_000_000 // dtype.itemsize + 1000 * rank for rank in range(world.size)]
    output = device_of(torch.ones(lengths[world.rank], dtype=dtype))
    pieces = [(torch.arange(length) % 97 * (world.rank + 1)).to(dtype) for length in lengths]
    inputs = [device_of(piece) for piece in pieces]
    synchronizations.clear()
    dist.reduce_scatter(output, inputs)
    assert {wait.name for wait in synchronizations} <= {"event"}
    factor = sum(range(1, world.size + 1))
    assert torch.equal(values(output), (torch.arange(len(output)) % 97 * factor).to(dtype))


@pytest.fixture
def in_short_rounds(monkeypatch):
    """Let tensors of more than 5 kB go in rounds."""
    monkeypatch.setattr(staging, "MAX_PINNED_BYTES", 5000)
    monkeypatch.setattr(rounds, "_ROUND_BYTES", 1600)
    monkeypatch.setattr(rounds, "_LEAST_CUT_BYTES", 64)
    monkeypatch.setattr(chunking, "_MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(chunking.ChunkLengths, "limit_bytes", 1024)


@pytest.mark.sizes(2, 3)
def test_long_gathers_copy_parts_while_others_are_exchanged(world, device_of, in_short_rounds):
    lengths = [1500 + 200 * rank for rank in range(world.size)]
    contents = [torch.arange(length) + 5000.0 * rank for rank, length in enumerate(lengths)]
    pieces = [device_of(torch.zeros(length)) for length in lengths]
    own, whole = device_of(contents[world.rank]), device_of(torch.zeros(world.size, 1500))
    in_place = device_of(torch.cat(contents)).split(lengths)
    short = own[:1500].clone()
    synchronizations.clear()
    dist.all_gather(pieces, own)
    dist.all_gather([*in_place], in_place[world.rank])
    dist.all_gather_into_tensor(whole, short)
    assert {wait.name for wait in synchronizations} <= {"event"}
    for results in (pieces, in_place):
        assert all(torch.equal(values(f), c) for f, c in zip(results, contents, strict=True))
    assert torch.equal(values(whole), torch.stack([content[:1500] for content in contents]))
    if dist.group.WORLD.uses_library:
        return
    group, shift = dist.new_group(), int(world.rank == 0)
    pieces[0] = pieces[0][shift:]
    with pytest.raises(CollectiveError, match="different sizes"):
        dist.all_gather(pieces, own[shift:], group)
    dist.destroy_process_group(group)


@pytest.mark.sizes(2, 3)
def test_what_a_rank_only_receives_waits_for_the_copies_back(world, device_of, in_short_rounds):
    """The rounds of a rank that sends less than the others have nothing to copy out."""
    fake_device.set_bandwidth(float("inf"), 1e6)
    lengths = [0] + [4000] * (world.size - 1)
    contents = [torch.arange(length) + 5000.0 * rank for rank, length in enumerate(lengths)]
    pieces = [device_of(torch.zeros(length)) for length in lengths]
    dist.all_gather(pieces, device_of(contents[world.rank]))
    assert all(torch.equal(values(p), c) for p, c in zip(pieces, contents, strict=True))


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "dtype", by_default([torch.float32, torch.bfloat16, torch.complex64], [torch.bfloat16])
)
def test_other_long_tensors_pass_through_page_locked_memory(
    world, device_of, in_short_rounds, dtype
):
    size, last = world.size, world.size - 1
    kind = dtype.itemsize
    # A message of each pair, some of which are empty; row r is what rank r sends.
    lengths = [[(5 * (a + 2 * b) % 7) * 3000 // kind for b in range(size)] for a in range(size)]
    contents = [
        [(torch.arange(n) % 113 + 7 * a).to(dtype) for n in row] for a, row in enumerate(lengths)
    ]
    to_me = [row[world.rank] for row in contents]
    sent = [device_of(row) for row in contents[world.rank]]
    got = [device_of(torch.zeros_like(row)) for row in to_me]
    flat, joined = device_of(torch.cat(contents[world.rank])), device_of(torch.cat(to_me) * 0)
    whole = (torch.arange(9000) % 113).to(dtype)
    shared = device_of(whole if world.rank == last else whole * 0)
    rows = [whole[:3000] + rank for rank in range(size)]
    row = device_of(rows[world.rank].clone())
    gathered = [device_of(content * 0) for content in rows] if world.rank == last else None
    mine, inputs = device_of(row * 0), [device_of(content) for content in rows]
    synchronizations.clear()
    dist.all_to_all(got, sent)
    dist.all_to_all_single(joined, flat, [*map(len, to_me)], [*map(len, sent)])
    dist.broadcast(shared, last)
    dist.gather(row, gathered, last)
    dist.scatter(mine, inputs if world.rank == last else None, last)
    assert {wait.name for wait in synchronizations} <= {"event"}
    for piece, content in zip((*got, joined), (*to_me, torch.cat(to_me)), strict=True):
        assert torch.equal(values(piece), content)
    assert torch.equal(values(shared), whole)
    assert torch.equal(values(mine), rows[world.rank])
    for piece, content in zip(gathered or (), rows, strict=False):
        assert torch.equal(values(piece), content)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "dtype",
    by_default([torch.float32, torch.bfloat16, torch.int64], [torch.float32, torch.bfloat16]),
)
def test_long_reductions_to_one_rank_pass_through_page_locked_memory(
    world, device_of, in_short_rounds, dtype
):
    content, factor = (torch.arange(9000) % 19).to(dtype), sum(range(1, world.size + 1))
    tensor, second = (device_of(content * (world.rank + 1)) for _ in range(2))
    equal = device_of(content[: 9000 // world.size] * 0)
    synchronizations.clear()
    dist.reduce(tensor, 1)
    dist.reduce_scatter_tensor(equal, second.view(5, -1))  # the ranks' parts are not whole rows
    assert {wait.name for wait in synchronizations} <= {"event"}
    if world.rank == 1 or not dist.group.WORLD.uses_library:
        expected = content * (factor if world.rank == 1 else world.rank + 1)
        assert torch.equal(values(tensor), expected)
    part = content.chunk(world.size)[world.rank] * factor
    assert torch.equal(values(equal), part)


CHUNKS = 8
ROUNDING_SEC = 1e-6


def test_copies_are_recorded_when_the_device_carries_them_out():
    recorder = timeline.Recorder(1)
    fake_device.set_bandwidth(BUS)

    def relay():
        return relayed(StreamCopies, chunks=CHUNKS)

    began = time.monotonic()
    timeline.start_recording(recorder)
    try:
        assert timeline.recorded(relay, "all_reduce", timeline.GroupLabel("", ""), 1)()
    finally:
        timeline.stop_recording()
        fake_device.set_bandwidth()
    device_of(fake_device.current()).mark().wait()
    events = recorder.take_device_spans(device_of(fake_device.current()).mark)
    now = recorder.now()
    lanes = timeline.COPY_OUT, timeline.COPY_BACK
    by_lane = [[event for event in events if event.lane == lane] for lane in lanes]
    for spans in by_lane:
        assert len(spans) == CHUNKS
        assert all(span.end - span.start > 0.9 * COPY_SEC for span in spans[:-1])
        assert all(began < span.start and span.end < now for span in spans)
        # A copy is not shown while it waits for its turn.
        assert all(b.start > a.end - ROUNDING_SEC for a, b in itertools.pairwise(spans))
    assert all(back.start > out.end for out, back in zip(*by_lane, strict=True))
