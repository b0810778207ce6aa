"""Which device a script takes under kaitian-run, on emulated hosts as strict as CUDA."""

import os
import pkgutil
import re
import subprocess
import sys

import pytest

from kaitian_mpi.cli.run import local_rank_of
from kaitian_mpi.cli.train import hide_unused_devices
from kaitian_mpi.devices import known_kinds
from kaitian_mpi.devices.choice import VISIBILITY, choose_device, hide_accelerators
from kaitian_mpi.devices.registry import BUILT_IN
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.topology import RankInfo

UUIDS = [f"GPU-{letter}" for letter in "abcdefgh"]


class Cuda:
    """A process's view of its host's GPUs, taken once, as the driver takes it."""

    def __init__(self, environ, gpus):
        listed = environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus, self.current = [], 0
        entries = map(str, range(len(gpus))) if listed is None else listed.split(",")
        for entry in entries:
            known = [entry] if entry.startswith("MIG-") else [g for g in gpus if g == entry]
            known += [gpus[int(entry)]] if entry.isdigit() and int(entry) < len(gpus) else []
            if not known:
                break
            self.gpus += known
        if len(set(self.gpus)) < len(self.gpus):
            self.gpus = []
        if any(gpu.startswith("MIG-") for gpu in self.gpus):
            del self.gpus[1:]

    def at(self, index):
        if not 0 <= index < len(self.gpus):
            raise RuntimeError("invalid device ordinal")
        return self.gpus[index]

    def set_device(self, index):
        self.at(index)
        self.current = index


def taken(hosts, environs=({},)):
    """Return each rank's LOCAL_RANK and device; the last environment holds for the rest."""
    drivers, infos, indices = [], [], []
    for node, (gpus, devices) in enumerate(hosts):
        size = 2 if devices == "auto" else len(devices.split(","))
        on_host = []
        for local in range(size):
            environ = dict(environs[min(local, len(environs) - 1)])
            launch = {"RANK": len(infos), "SIZE": 9, "LOCAL_RANK": local, "LOCAL_SIZE": size}
            environ |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in launch.items()}
            hide_unused_devices(environ, devices)
            on_host.append(Cuda(environ, gpus))
        seen = [{"cuda": tuple(driver.gpus)} for driver in on_host]
        for local, driver in enumerate(on_host):
            counts = {"cuda": len(driver.gpus), "cpu": 1}
            inventories = seen if devices == "auto" else ()
            choice = choose_device(devices, counts, local, size, "h", inventories=inventories)
            device = "cpu" if choice.kind == "cpu" else f"cuda:{choice.index}"
            if device != "cpu":
                driver.set_device(choice.index)  # as kaitian-run does
            fields = (len(infos), local, "h", choice.kind, device, "", 0, "2.13")
            infos.append(RankInfo(*fields, node=node))
            drivers.append(driver)
            indices.append(choice.index)
    ranks = [local_rank_of(infos, rank, index) for rank, index in enumerate(indices)]
    return list(zip(ranks, map(asked, drivers, ranks), strict=True))


def asked(driver, local_rank):
    """Return the device that a script gets: plain, by LOCAL_RANK, current, and by set_device."""
    if not driver.gpus:  # torch.cuda.is_available() is False
        return "cpu"
    plain = driver.at(driver.current)
    by_number = driver.at(local_rank)
    current = driver.at(driver.current)  # current_accelerator() has no index
    driver.set_device(local_rank)
    (only,) = {plain, by_number, current, driver.at(driver.current)}
    return only


TWO, EIGHT, ONE = UUIDS[:2], UUIDS, UUIDS[:1]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
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
    ],
)
def test_every_way_to_ask_leads_to_the_ranks_own_device(hosts, expected):
    assert taken(hosts) == expected


@pytest.mark.parametrize(
    ("devices", "listed", "expected"),
    [
        ("cuda:2,cpu", ["7,6,5,4"], [(2, "GPU-f"), (1, "cpu")]),
        ("cuda:1,cuda:3", ["GPU-h,GPU-g,GPU-f,GPU-e"], [(1, "GPU-g"), (3, "GPU-e")]),
        ("auto", ["4", "6"], [(0, "GPU-e"), (0, "GPU-g")]),  # as srun --gpus-per-task=1 sets it
        ("auto", ["MIG-1", "MIG-2"], [(0, "MIG-1"), (0, "MIG-2")]),
        ("cuda:0,cuda:0", ["MIG-1", "MIG-2"], [(0, "MIG-1"), (0, "MIG-2")]),
        ("auto", ["", "3"], [(1, "cpu"), (0, "GPU-d")]),
    ],
)
def test_what_the_user_makes_visible_stays_so(devices, listed, expected):
    environs = [{"CUDA_VISIBLE_DEVICES": value} for value in listed]
    assert taken([(EIGHT, devices)], environs) == expected


@pytest.mark.parametrize("listed", [None, "", "-1", "3"])
def test_a_gpu_that_is_not_there_is_named_as_in_the_request(listed):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    with pytest.raises(UserError, match=r"local rank 1 on h asks for cuda:9, but h has"):
        taken([(EIGHT, "cuda:0,cuda:9")], [{}, environ])


def test_each_vendor_has_its_variable():
    for kind, names in VISIBILITY.items():
        of_kind = pkgutil.resolve_name(BUILT_IN[kind])().visibility
        assert set(names) <= set(of_kind)
        hidden = dict(os.environ) | {"OMPI_COMM_WORLD_RANK": "0"}
        hide_unused_devices(hidden, "cpu")
        assert [hidden[name] for name in names] == ["-1"] * len(names)
    assert set(VISIBILITY) == set(known_kinds().counts | known_kinds().unusable) - {"cpu", "mps"}


def test_another_packages_kind_names_its_variable(tmp_path, monkeypatch):
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
