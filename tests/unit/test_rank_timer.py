"""Timing one rank and finding the batch that fits its memory, with a model that runs out of it."""

import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices import known_kinds
from kaitian_mpi.devices.cpu import CpuDevice, available_bytes
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.recipes.datasets import DataSource
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.train.measure import rank_timer
from kaitian_mpi.train.measure.rank_benchmark import BenchmarkCache
from kaitian_mpi.train.measure.rank_timer import (
    MemoryGauge,
    RankMeasurement,
    RankTimer,
    _TimedModel,
)
from kaitian_mpi.train.setup import Setup

MIB = 1 << 20
STEP_SEC, SAMPLE_SEC = 1e-2, 1e-4


CLOCK = SimpleNamespace(now=0.0)  # which only moves when seconds are added


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let only steps take time, so that load on the machine has no effect."""
    times = SimpleNamespace(perf_counter=lambda: CLOCK.now, thread_time=lambda: CLOCK.now)
    monkeypatch.setattr(rank_timer, "time", times)


class Device(CpuDevice):
    """A device whose steps take `base + per_sample * batch` bytes of `limit`."""

    base, per_sample, batch = 100, 10, 0

    def __init__(self, limit, is_host=True):
        self.limit, self.is_host = limit, is_host

    def __deepcopy__(self, _):  # with the model that reports its batches
        return self

    def memory_limit_bytes(self, index, sharers):
        return self.limit

    def memory_peak_bytes(self, index):
        return self.base + self.per_sample * self.batch


class CachingDevice(Device):
    """One that keeps what steps have used, until it is released."""

    reserved = peak = 0

    def take(self, batch):
        self.reserved = self.peak = max(self.reserved, self.base + self.per_sample * batch)
        return 1.0

    def release_cached_memory(self):
        self.reserved = 0

    def restart_memory_peak(self, index):
        self.peak = self.reserved

    def memory_peak_bytes(self, index):
        return self.peak


def test_memory_that_is_only_cached_counts_for_no_batch():
    device = CachingDevice(1000, is_host=False)
    device.take(30)  # such as what settings were compared with
    gauge = MemoryGauge(make_world(device))
    for batch in (5, 10):
        assert gauge.try_step(batch, device.take) == 1.0
    assert gauge.line(0) == (100, 10)
    assert gauge.largest_batch(100) == 80  # 90% of the memory


def test_memory_is_released_once_the_failed_step_has_let_go_of_it():
    held = []

    class Failing(CachingDevice):
        def release_cached_memory(self):
            held.append([reference() is not None for reference in references])

    class Tensor:
        pass

    def fail(batch):
        tensor = Tensor()
        references.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("tried to allocate")

    references = []
    gauge = MemoryGauge(make_world(Failing(1000, is_host=False)))
    assert gauge.try_step(5, fail) is None
    assert held == [[], [False]]
    assert not gauge.can_hold(5)


def make_world(device, size=1):
    names = {"host": "h", "device": "cpu", "device_name": "c", "physical_device": "", "kind": "cpu"}
    info = SimpleNamespace(**names, local_rank=0, world_rank=0)
    place = {"device": torch.device("cpu"), "device_kind": device, "device_index": 0}
    ranks = {"info": info, "infos": (info,), "size": size}
    return SimpleNamespace(**place, **ranks, threads=1, synchronize=lambda: None)


class Data(Dataset):
    gives_batches = True

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        return torch.ones(len(indices), 4), torch.zeros(len(indices), dtype=torch.int64)


class Hungry(nn.Module):
    """Accepts only batches within limits and takes time on the fake clock."""

    def __init__(self, most, device=None, least=1):
        super().__init__()
        self.layer, self.most, self.device, self.least = nn.Linear(4, 2), most, device, least

    def forward(self, x):
        if self.device is not None:
            self.device.batch = len(x)
        assert len(x) >= self.least
        if len(x) > self.most:
            raise torch.OutOfMemoryError("tried to allocate")
        CLOCK.now += STEP_SEC + SAMPLE_SEC * len(x)
        return self.layer(x)


def make_setup(config, model):
    task = classify(config, model, DataSource(Data(), Data(), 2))
    return Setup(task, NoFolder())


def measure(device, most=10**9, min_batch=1, ranks=1, repeats=True, **settings):
    defaults = {"global_batch_size": 256, "benchmark_seconds": 1.0, "memory_format": "contiguous"}
    config = TrainConfig(**defaults | {"epochs": 10**6} | settings)
    setup = make_setup(config, Hungry(most, device, min_batch))
    return RankTimer(config, make_world(device, ranks), setup, min_batch).measure(repeats)


HOST, ACCELERATOR = Device(limit=1 << 40), Device(limit=1 << 40, is_host=False)


def test_the_ends_of_the_line_are_timed_again_if_wanted():
    for repeats in (True, False):
        result = measure(HOST, repeats=repeats)
        assert [len(seconds) for seconds in result.rounds] == [1 + repeats, *[1] * 6, 1 + repeats]
        assert [*map(len, (result.batches, result.seconds))] == [8, 8]


def test_batch_sizes_grow(monkeypatch):
    for device, sample_sec, options, batches, largest in (
        # On a host sizes grow until the cost model is known.
        (HOST, 0.05, {"benchmark_seconds": 10.0}, [2, 4, 8, 16], None),
        # On an accelerator the memory of twice the usual share is tried.
        (ACCELERATOR, SAMPLE_SEC, {}, [64, 256], None),
        (ACCELERATOR, SAMPLE_SEC, {"ranks": 4}, [16, 64, 128], None),
        # Before memory is full: 90% of 1000 bytes less a base of 100 has room for 80 samples of 10.
        (Device(1000, is_host=False), SAMPLE_SEC, {"ranks": 4}, [16, 64], 80),
        # At an out-of-memory error.
        (ACCELERATOR, SAMPLE_SEC, {"most": 40, "ranks": 8}, [8, 32], 32),
        # At the user's micro-batch.
        (HOST, SAMPLE_SEC, {"micro_batch_size": 20}, [2, 4, 8, 16, 20], 20),
    ):
        monkeypatch.setitem(globals(), "SAMPLE_SEC", sample_sec)
        measured = measure(device, **options)
        assert (measured.batches, measured.largest_micro_batch) == (batches, largest)
        assert measured.seconds == pytest.approx([STEP_SEC + sample_sec * b for b in batches])


@pytest.mark.parametrize("options", [{"benchmark_seconds": 10.0}, {"max_steps": 1}, {"ranks": 32}])
def test_the_first_step_of_a_size_does_not_count_on_an_accelerator(monkeypatch, options):
    seen = set()

    def prepare_first(model, x):
        CLOCK.now += 2.0 * (len(x) not in seen)
        seen.add(len(x))
        return model.forward(x)

    monkeypatch.setattr(Hungry, "__call__", prepare_first)
    measured = measure(ACCELERATOR, **options)
    assert measured.seconds == pytest.approx([STEP_SEC + SAMPLE_SEC * b for b in measured.batches])
    assert len(measured.batches) >= 2


@pytest.mark.parametrize(("epochs", "chosen"), [(10, "contiguous"), (10**6, "channels_last")])
def test_a_format_that_is_slow_to_prepare_is_for_a_long_training(monkeypatch, epochs, chosen):
    seen = set()

    def take_time(model, computation, batch):
        began, memory_format = CLOCK.now, computation.memory_format
        CLOCK.now += 3.0 * (not seen)  # for the libraries
        new = (memory_format, batch) not in seen
        seen.add((memory_format, batch))
        seconds, preparation = {"contiguous": (0.03, 0.1), "channels_last": (0.02, 4.0)}[
            memory_format
        ]
        CLOCK.now += seconds + preparation * new
        return CLOCK.now - began

    monkeypatch.setattr(_TimedModel, "time_step", take_time)
    options = {"benchmark_seconds": 10.0, "memory_format": "auto", "epochs": epochs}
    assert measure(ACCELERATOR, **options).memory_format == chosen


# Seconds of a step and of a sample, as on 4 ranks that share 2 cores.
@pytest.mark.parametrize(
    ("step_sec", "sample_sec", "ranks", "steps", "most_sec"),
    [
        pytest.param(0.003, 0.0009, 2, 0, 1.1, id="cnn"),
        pytest.param(0.02, 0.028, 4, 0, 3.3, id="mobilenetv2"),
        # Of a short training: two batch sizes, each for at least 0.1 s, and the steps before.
        *((STEP_SEC, SAMPLE_SEC, 4, steps, 0.42) for steps in (1, 3, 10)),
    ],
)
def test_the_benchmark_ends_when_it_knows_enough(
    monkeypatch, step_sec, sample_sec, ranks, steps, most_sec
):
    monkeypatch.setitem(globals(), "STEP_SEC", step_sec)
    monkeypatch.setitem(globals(), "SAMPLE_SEC", sample_sec)
    began = CLOCK.now
    memory_format = "contiguous" if steps else "auto"
    options = {"benchmark_seconds": 10.0, "memory_format": memory_format, "max_steps": steps}
    measure(HOST, ranks=ranks, **options)
    assert CLOCK.now - began <= max(steps * (STEP_SEC + SAMPLE_SEC * 64), most_sec)


@pytest.mark.parametrize("memory_format", ["contiguous", "auto"])
@pytest.mark.parametrize(
    ("most", "min_batch", "global_batch_size"),
    [(3, 1, 256), *((most, 2, size) for most in (2, 3, 7) for size in (2, 3, 7, 256))],
)
def test_a_device_that_fits_few_samples_takes_part_and_one_for_none_is_an_error(
    memory_format, most, min_batch, global_batch_size
):
    settings = {"memory_format": memory_format, "global_batch_size": global_batch_size}
    measured = measure(HOST, most, min_batch, **settings)
    assert min_batch <= min(measured.batches) <= max(measured.batches)
    assert max(measured.batches) <= min(most, global_batch_size)
    if min_batch == 1:
        assert len(measured.batches) >= 2
        assert measured.largest_micro_batch in (2, 3)
    needed = (
        r"a single sample.*auto.*leave it out \(other ",
        "cpu is out of memory for .* 2 samples",
    )
    with pytest.raises(UserError, match=needed[min_batch - 1]):
        measure(HOST, min_batch - 1, min_batch)


def test_a_device_without_memory_for_the_model_is_an_error_that_says_what_helps(monkeypatch):
    def refuse(_):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(rank_timer.copy, "deepcopy", refuse)
    message = "cpu is out of memory for a copy of the model; give --layout auto, .*large-models.md"
    with pytest.raises(UserError, match=message):
        measure(HOST)


# As users report them in the vendors' and their own issue trackers, and as the sources print them.
TOO_LITTLE_MEMORY = (
    "CUDA error: out of memory", "CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "NCCL error, unhandled cuda error. Last error:\nFailed to CUDA calloc 6291456 bytes",
    "NCCL error, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "HIP error: out of memory",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "miopenStatusAllocFailed",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)",
    "NPU function error: aclrtMallocHostWithCfg, error code is 207001",
    "call aclnnBatchMatMul failed.\nMemory_Allocation_Failure(EL0004): Failed to allocate memory",
    "Allocation_Failure(EI0007): Failed to allocate resource[qp]. Reason: Memory resources are",
    "CNNL error: CNNL_STATUS_ALLOC_FAILED", "MUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory (MPS allocated: 18.00 GB)",
)  # fmt: skip
ON_THE_HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you",
    "DefaultCPUAllocator: not enough memory: you tried",
    "could not create a memory object",
)
OTHER_FAULTS = (
    "shapes differ",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: too many resources requested for launch",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "NPU function error: aclrtSynchronizeStream, error code is 507018",
)


@pytest.mark.parametrize("device", known_kinds().devices.values(), ids=lambda device: device.kind)
def test_every_way_of_saying_too_little_memory_is_known(device):
    texts = ON_THE_HOST if device.is_host else (*TOO_LITTLE_MEMORY, *ON_THE_HOST)
    errors = [*map(RuntimeError, texts), torch.OutOfMemoryError("x"), MemoryError()]
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    errors.append(caught.value)  # torch's own on this host
    assert [str(error) for error in errors if not device.is_out_of_memory(error)] == []
    others = [*map(RuntimeError, OTHER_FAULTS), ValueError("out of memory")]
    assert [str(error) for error in others if device.is_out_of_memory(error)] == []


def test_ranks_on_one_device_share_its_memory():
    gauge = MemoryGauge(make_world(CpuDevice()))
    assert [gauge.try_step(batch, float) for batch in (8, 16)] == [8, 16]
    assert gauge.can_hold(17)

    class Gpu(CpuDevice):
        def memory_limit_bytes(self, index, sharers):
            return 6_000 // sharers

    world = make_world(Gpu())
    # The last one is another device that its rank sees by the same index.
    elsewhere = [("h", "cuda:1", ""), ("other", "cpu", ""), ("h", "cpu", "0/cuda/0000:3b:00")]
    names = "host", "device", "physical_device"
    world.infos += tuple(SimpleNamespace(**dict(zip(names, i, strict=True))) for i in elsewhere)
    alone = MemoryGauge(world)
    world.infos += (world.info,)
    beside_another = MemoryGauge(world)
    for gauge in (alone, beside_another):
        for batch in (1, 2):
            world.device_kind.memory_peak_bytes = lambda index, batch=batch: 1_000 * batch
            gauge.try_step(batch, float)
    # Of 90% of 6,000 bytes.
    assert [gauge.largest_batch(9) for gauge in (alone, beside_another)] == [5, 2]


def test_memory_of_a_host_is_limited_by_the_control_groups_of_the_process(tmp_path):
    groups = tmp_path / "root", tmp_path / "root/job", tmp_path / "root/job/step"
    groups[-1].mkdir(parents=True)
    own = tmp_path / "cgroup"
    assert available_bytes(groups[0], own) > 10 * MIB  # there is no such file
    own.write_text("1:name=systemd:/\n0::/job/step\n")
    assert available_bytes(groups[0], own) > 10 * MIB
    for group, limit in zip(groups, ("max", "1000000", "2000000"), strict=True):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("400000\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_bytes(groups[0], own) == 700000
    own.write_text("0::/\n")  # in a container
    assert available_bytes(groups[0], own) > 10 * MIB
    assert available_bytes(groups[1], own) == 700000


ROUNDS = [[0.1, 0.1], [0.2]]
FOUND = RankMeasurement([8, 16], [0.1, 0.2], None, "contiguous", "fp32", rounds=ROUNDS)


def make_cache(folder, **settings):
    config = TrainConfig(**{"benchmark_cache": str(folder)} | settings)
    world = make_world(CpuDevice())
    return BenchmarkCache(config, world, make_setup(config, nn.Linear(4, 2)))


def test_cached_results_are_of_the_same_measurement_valid_and_written_by_the_user(
    tmp_path, monkeypatch
):
    folder = tmp_path / "new"
    assert make_cache(folder).read() is None
    make_cache(folder).write(FOUND)
    assert make_cache(folder).read() == replace(FOUND, from_cache=True)
    for change in ({"precision": "bf16"}, {"model": "cnn"}, {"global_batch_size": 1000}):
        assert make_cache(folder, **change).read() is None
    assert make_cache("").read() is None
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--benchmark-cache"):
        make_cache(tmp_path / "file").write(FOUND)
    cache = make_cache(tmp_path)
    cache.write(FOUND)
    (file,) = tmp_path.glob("*.json")
    text = file.read_text()
    for old, new in (
        *((None, ""), (None, "[]"), ("0.1", "-0.1"), ("0.1,", ""), ("0.1,", '"x",')),
        *(("0.1,", "NaN,"), ('"seconds"', '"secs"'), ('"measurement"', '"measured"')),
    ):
        file.write_text(text.replace(old or text, new))
        assert cache.read() is None
    file.write_text(text)

    def is_read():
        return make_cache(tmp_path).read() is not None

    assert is_read()
    file.chmod(0o666)
    assert not is_read()
    file.chmod(0o644)
    kept = file.rename(tmp_path / "kept")
    file.symlink_to(kept)
    assert not is_read()
    kept.replace(file)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert is_read() == (owner == 0)  # files of root are trusted
