"""Which device a rank takes, and which a script takes under kaitian-run."""

import os
import pkgutil
import re
import subprocess
import sys

import pytest
from jobs import PYTHON, run_alone

from kaitian_mpi.cli.run import local_rank_of
from kaitian_mpi.cli.train import hide_unused_devices
from kaitian_mpi.devices import known_kinds
from kaitian_mpi.devices.choice import (
    VISIBILITY,
    Choice,
    assign_devices,
    choose_device,
    hide_accelerators,
)
from kaitian_mpi.devices.registry import BUILT_IN
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.integrations.lightning_ranks import number_on_host
from kaitian_mpi.mpi.topology import RankInfo, check_own_devices, shared_devices

TWO_GPUS = {"cuda": 2, "cpu": 8}
NO_GPU = {"cuda": 0, "cpu": 8}


def test_a_rank_takes_the_device_asked_for_and_ranks_of_a_group_that_share_one_are_found():
    for devices, counts, local_rank, local_size, expected in (
        ("auto", NO_GPU, 3, 4, Choice("cpu", 3)),
        ("auto", TWO_GPUS, 1, 2, Choice("cuda", 1)),
        ("cpu", TWO_GPUS, 5, 9, Choice("cpu", 5)),
        ("cuda:1,cuda:0,cpu", TWO_GPUS, 0, 3, Choice("cuda", 1)),
        ("cuda:1,cuda:0,cpu", TWO_GPUS, 2, 3, Choice("cpu", 0)),
        ("cuda,cpu,cpu", TWO_GPUS, 0, 2, Choice("cuda", 0)),
        ("cuda:0,rocm:0", TWO_GPUS, 0, 2, Choice("cuda", 0)),  # of another build of torch
    ):
        assert choose_device(devices, counts, local_rank, local_size, "h") == expected
    for devices, counts, local_size, message in (
        ("auto", TWO_GPUS, 3, r"3 ranks on h, but h has 2 cuda; .* cuda:0,cuda:1,cpu"),
        ("cuda:0", NO_GPU, 1, r"asks for cuda:0, but h has no accelerator"),
        ("cuda:5", TWO_GPUS, 1, r"asks for cuda:5, but h has 2 cuda"),
        ("cuda:0,cuda:1", TWO_GPUS, 4, r"is too short for the 4 ranks on h; list a device"),
        ("tpu:0", TWO_GPUS, 1, r"'tpu:0' is not a device; give auto"),
        ("cuda:x", TWO_GPUS, 1, r"'cuda:x' is not a device; give auto"),
        ("cpu:1", NO_GPU, 1, r"'cpu:1': CPUs have no numbers; write cpu"),
        ("cpu,,cpu", NO_GPU, 1, r"'cpu,,cpu': a device is missing beside a comma"),
        ("cuda:0,", TWO_GPUS, 1, r"'cuda:0,': a device is missing beside a comma"),
    ):
        with pytest.raises(UserError, match=message):
            choose_device(devices, counts, 0, local_size, "h")

    def info(rank, kind, device, library="NCCL"):
        fields = (rank, rank, "h", kind, "cuda:0", "a GPU", 0, "2.13")
        return RankInfo(*fields, physical_device=device, library=library)

    def sharing(*infos):
        return [[info.world_rank for info in some] for some in shared_devices(infos)]

    for first, second in (
        (("cuda", "0/A"), ("cuda", "0/B")),
        (("cuda", "0/A"), ("cuda", "8/A")),  # another node's
        (("cuda", "0/A"), ("mlu", "0/A")),  # another group
        (("mps", "0/A", ""), ("mps", "0/A", "")),  # no library
        (("cpu", "", ""), ("cpu", "", "")),
    ):
        assert sharing(info(0, *first), info(1, *second)) == []
    assert sharing(*(info(n, "cuda", f"0/{n % 2}") for n in range(4))) == [[0, 2], [1, 3]]
    with pytest.raises(AgreedError, match=r"share one device \(A\), which"):
        check_own_devices([info(rank, "cuda", "0/A") for rank in range(2)])


A, B, C = {"cuda": ["A"]}, {"cuda": ["B"]}, {"cuda": ["A", "B", "C"]}
MIXED = {"cuda": ["A"], "xpu": ["A"]}  # two kinds may identify devices alike


def test_auto_gives_each_rank_a_device_of_its_own_unless_they_share():
    def named(choices):
        return [choice and f"{choice.kind}:{choice.index}" for choice in choices]

    ab, bc = {"cuda": ["A", "B"]}, {"cuda": ["B", "C"]}
    for inventories, expected in (
        ([MIXED, MIXED], ["cuda:0", "xpu:0"]),
        ([A, {"xpu": ["X"]}], ["cuda:0", "xpu:0"]),  # two builds of torch
        ([A, B], ["cuda:0", "cuda:0"]),  # CUDA_VISIBLE_DEVICES differs
        ([C, C, C], ["cuda:0", "cuda:1", "cuda:2"]),
        ([C, A], ["cuda:1", "cuda:0"]),  # only the first has another
        ([C, {"cuda": ["C", "B"]}, A], ["cuda:1", "cuda:0", "cuda:0"]),
        ([ab, bc, ab], ["cuda:0", "cuda:1", "cuda:1"]),
        ([A, {}, {"cuda": []}], ["cuda:0", None, None]),
        ([{}, {}], [None, None]),
    ):
        assert named(assign_devices(inventories, "h")) == expected
        counts = {"cuda": 1, "cpu": 1}
        for rank, choice in enumerate(assign_devices(inventories, "h")):
            chosen = choose_device("auto", counts, rank, 9, "h", inventories=inventories)
            assert chosen == (choice or Choice("cpu", rank))
    start_2 = (
        r"3 ranks on h, but h has 1 cuda, 1 xpu; start 2 .* --devices cuda:0,xpu:0,cpu, or let "
    )
    for inventories, message, shared in (
        ([A, A], r"2 ranks on h, but h has 1 cuda; start 1 ranks .* cuda:0,cpu,", ["cuda:0"] * 2),
        ([MIXED] * 3, f"{start_2}ranks .* with --share-device", ["cuda:0", "xpu:0", "cuda:0"]),
        ([A, B, A], r"3 ranks on h, but h has 2 cuda; start 2", ["cuda:0"] * 3),
        ([MIXED] * 5, r"5 ranks on h", [*["cuda:0", "xpu:0"] * 2, "cuda:0"]),
    ):
        with pytest.raises(UserError, match=message):
            assign_devices(inventories, "h")
        assert named(assign_devices(inventories, "h", share=True)) == shared


@pytest.mark.parametrize("kind", known_kinds().devices)
def test_every_kind_satisfies_the_protocol(kind):
    device = known_kinds().devices[kind]
    assert device.kind == kind
    assert device.torch_device(0).type in (kind, "cuda")
    if device.count():
        device.select(0)
        device.synchronize(0)
        assert device.name(0)
        assert device.memory_bytes(0) > 1 << 20
        device.restart_memory_peak(0)
        assert device.memory_peak_bytes(0) >= 0
        assert 0 < device.memory_limit_bytes(0, 2) <= device.memory_limit_bytes(0, 1)
        device.release_cached_memory()
        earlier, later = device.mark(), device.mark()
        later.wait()
        assert later.is_reached()
        assert later.seconds_since(earlier) >= 0
        state = device.random_state(0)
        assert (state is None) == device.is_host
        if state is not None:
            device.set_random_state(0, state)


UUIDS = [f"GPU-{letter}" for letter in "abcdefgh"]


def visible(environ, gpus):
    """Return the GPUs that a process sees, which its driver takes once."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    seen = []
    for entry in map(str, range(len(gpus))) if listed is None else listed.split(","):
        if entry.startswith("MIG-"):
            return [entry]
        numbered = gpus[int(entry) :][:1] if entry.isdigit() else []
        known = [gpu for gpu in gpus if gpu == entry] or numbered
        if not known:
            break
        seen += known
    return seen


def taken(hosts, environs=({},)):
    """Return each rank's LOCAL_RANK and device; the last environment holds for the rest."""
    infos, own = [], []
    for node, (gpus, devices) in enumerate(hosts):
        size = 2 if devices == "auto" else len(devices.split(","))
        on_host = []
        for local in range(size):
            environ = dict(environs[min(local, len(environs) - 1)])
            launch = {"RANK": len(infos), "SIZE": 9, "LOCAL_RANK": local, "LOCAL_SIZE": size}
            environ |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in launch.items()}
            hide_unused_devices(environ, devices)
            on_host.append(visible(environ, gpus))
        inventories = [{"cuda": seen} for seen in on_host] if devices == "auto" else ()
        for local, seen in enumerate(on_host):
            counts = {"cuda": len(seen), "cpu": 1}
            choice = choose_device(devices, counts, local, size, "h", inventories=inventories)
            device = "cpu" if choice.kind == "cpu" else f"cuda:{choice.index}"
            infos.append(
                RankInfo(len(infos), local, "h", choice.kind, device, "", 0, "", node=node)
            )
            # Without GPUs, torch.cuda.is_available() is False.
            own.append((choice.index, seen if device != "cpu" else seen and ["another's"]))
    ranks = [local_rank_of(infos, rank, index) for rank, (index, _) in enumerate(own)]
    for node, _ in enumerate(hosts):
        here = [rank for rank, info in enumerate(infos) if info.node == node]
        in_order = sorted(here, key=lambda rank: number_on_host(infos, rank))
        assert [number_on_host(infos, rank) for rank in in_order] == list(range(len(here)))
        on_gpus = [rank for rank in in_order if not infos[rank].is_on_host]
        assert in_order[: len(on_gpus)] == sorted(on_gpus, key=lambda rank: (ranks[rank], rank))
    for rank, (index, seen) in zip(ranks, own, strict=True):
        # kaitian-run makes it the current one, and the script takes that or the one of its number.
        assert not seen or seen[index] == seen[rank]
    return [(rank, seen[i] if seen else "cpu") for rank, (i, seen) in zip(ranks, own, strict=True)]


TWO, EIGHT, ONE = UUIDS[:2], UUIDS, UUIDS[:1]


def test_every_way_to_ask_leads_to_the_ranks_own_device_of_those_made_visible():
    for hosts, expected in (
        ([(ONE, "cpu,cuda:0")], [(1, "cpu"), (0, "GPU-a")]),
        ([(TWO, "auto")], [(0, "GPU-a"), (1, "GPU-b")]),
        ([([], "auto")], [(0, "cpu"), (1, "cpu")]),
        ([(TWO, "cpu,cpu,cpu")], [(0, "cpu"), (1, "cpu"), (2, "cpu")]),
        (
            [(TWO, "cuda:0,cuda:1,cpu"), (ONE, "cpu,cuda:0"), ([], "cpu")],
            [(0, "GPU-a"), (1, "GPU-b"), (2, "cpu"), (1, "cpu"), (0, "GPU-a"), (0, "cpu")],
        ),
        ([(EIGHT, "cuda:5,cpu,cuda:3")], [(5, "GPU-f"), (2, "cpu"), (3, "GPU-d")]),
        ([(TWO, "cuda:1,cuda:0")], [(1, "GPU-b"), (0, "GPU-a")]),
        ([(EIGHT, "cuda:7,cuda:7,cpu")], [(7, "GPU-h"), (7, "GPU-h"), (2, "cpu")]),  # shared
    ):
        assert taken(hosts) == expected
    for devices, listed, expected in (
        ("cuda:2,cpu", ["7,6,5,4"], [(2, "GPU-f"), (1, "cpu")]),
        ("cuda:1,cuda:3", ["GPU-h,GPU-g,GPU-f,GPU-e"], [(1, "GPU-g"), (3, "GPU-e")]),
        ("auto", ["4", "6"], [(0, "GPU-e"), (0, "GPU-g")]),  # as srun --gpus-per-task=1 sets it
        ("auto", ["MIG-1", "MIG-2"], [(0, "MIG-1"), (0, "MIG-2")]),
        ("cuda:0,cuda:0", ["MIG-1", "MIG-2"], [(0, "MIG-1"), (0, "MIG-2")]),
        ("auto", ["", "3"], [(1, "cpu"), (0, "GPU-d")]),
    ):
        environs = [{"CUDA_VISIBLE_DEVICES": value} for value in listed]
        assert taken([(EIGHT, devices)], environs) == expected


@pytest.mark.parametrize("listed", [None, "", "-1", "3"])
def test_a_gpu_that_is_not_there_is_named_as_in_the_request(listed):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    with pytest.raises(UserError, match=r"local rank 1 on h asks for cuda:9, but h has"):
        taken([(EIGHT, "cuda:0,cuda:9")], [{}, environ])


def test_each_vendor_and_another_packages_kind_has_its_variable(tmp_path, monkeypatch):
    for kind, names in VISIBILITY.items():
        of_kind = pkgutil.resolve_name(BUILT_IN[kind])().visibility
        assert set(names) <= set(of_kind)
        hidden = dict(os.environ) | {"OMPI_COMM_WORLD_RANK": "0"}
        hide_unused_devices(hidden, "cpu")
        assert [hidden[name] for name in names] == ["-1"] * len(names)
    assert set(VISIBILITY) == set(known_kinds().counts | known_kinds().unusable) - {"cpu", "mps"}
    (tmp_path / "acme-1.0.dist-info").mkdir()
    points = "[kaitian_mpi.visibility]\nacme = ACME_DEVICES\ncuda = WRONG\n"
    (tmp_path / "acme-1.0.dist-info/entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    hidden = hide_accelerators("cpu", 0, 1)
    assert {"ACME_DEVICES", *VISIBILITY["cuda"]} <= set(hidden)
    assert "WRONG" not in hidden


@pytest.mark.parametrize("command", ["run.py", "train.py"])
def test_a_cpu_rank_sees_no_accelerator_before_mpi_and_torch_are_loaded(tmp_path, command):
    for name in ("mpi4py", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"import os, sys\nprint({name!r}, os.environ.get('ASCEND_RT_VISIBLE_DEVICES'))\n"
            "sys.stdout.flush()\nos._exit(0)\n"
        )
    script = tmp_path / "theirs.py"
    script.touch()
    words = ["--model=cnn"] if command == "train.py" else [str(script)]
    done = subprocess.run(
        [sys.executable, "-m", f"kaitian_mpi.cli.{command[:-3]}", "--devices", "cpu", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.fullmatch(r"(mpi4py|torch) -1\n", done.stdout), done.stderr


_KEEPS = """
import torch
from kaitian_mpi.devices.cpu import CpuDevice
device = CpuDevice()
device.select(0)
tensor = torch.ones(25 << 20)
first = torch.ones(1)  # above it, so that the heap cannot shrink by itself
used = device.memory_peak_bytes(0)
del tensor
kept = device.memory_peak_bytes(0)
device.return_freed_memory()
returned = device.memory_peak_bytes(0)
device.return_large_blocks()
tensor = torch.ones(25 << 20)
second = torch.ones(1)
del tensor
print(used - kept, used - returned, device.memory_peak_bytes(0) - returned)
"""


@pytest.mark.linux("reads the memory of a process there")
def test_the_cpu_keeps_what_is_freed_until_it_is_told_to_return_it(tmp_path):
    (tmp_path / "keeps.py").write_text(_KEEPS)
    out = run_alone(PYTHON, str(tmp_path / "keeps.py"), cwd=tmp_path).out
    kept, returned, more = map(int, out.split())
    assert kept < 10 << 20
    assert returned > 90 << 20
    assert more < 10 << 20
