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
    for rank, (index, seen) in zip(ranks, own, strict=True):
        # kaitian-run makes it the current one, and the script takes that or the one of its number.
        assert not seen or seen[index] == seen[rank]
    return [(rank, seen[i] if seen else "cpu") for rank, (i, seen) in zip(ranks, own, strict=True)]


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
