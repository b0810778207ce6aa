"""Device kinds of other packages."""

import sys

import pytest
import torch

from kaitian_mpi.devices import device_of, known_kinds, registry
from kaitian_mpi.devices.choice import choose_device
from kaitian_mpi.errors import UserError

ACCELERATORS = [kind for kind in known_kinds().devices if kind != "cpu"]  # of this torch's build

MODULE = """
from kaitian_mpi.devices.cpu import CpuDevice

class Good(CpuDevice):
    kind = "good"
    torch_type = "meta"

class Idle(Good):
    kind = "idle"
    def count(self):
        return 0

class Broken(Good):
    kind = "broken"
    def count(self):
        raise OSError("libvendor.so:\\n cannot open")

class Little:
    kind = torch_type = "little"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return what puts a package with these entry points on Python's path, and loads the kinds."""

    def forget():
        known_kinds.cache_clear()
        registry._device_of_type.cache_clear()

    def add(**kinds):
        information = tmp_path / "plug_in-2.1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 2.1")
        lines = [f"{kind} = {value}" for kind, value in kinds.items()]
        text = "\n".join([f"[{registry.GROUP}]", *lines])
        (information / "entry_points.txt").write_text(text)
        (tmp_path / "plug_in.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "plug_in", raising=False)
        forget()
        return known_kinds()

    yield add
    forget()


def test_a_package_adds_kinds_and_the_one_with_devices_is_that_of_the_torch_type(install):
    known = install(
        idle="plug_in:Idle", good="plug_in:Good", cpu="plug_in:Good", npu="plug_in:Good"
    )
    assert {*known.devices} == {*ACCELERATORS, "good", "idle", "cpu"}
    for kind in ("cpu", "npu"):
        assert "there is another kind, or a built-in one, of this name" in known.faults.pop(kind)
    assert known.faults == {}
    # --devices auto prefers it to the CPU, as any accelerator.
    for devices, counts in (("good:1", {}), ("auto", {"cuda": 0})):
        assert choose_device(devices, {**known.counts, **counts}, 0, 1, "h").kind == "good"
    for torch_type, kind in (("meta", "good"), ("cpu", "cpu")):
        assert device_of(torch.device(torch_type)) is known.devices[kind]
    device = device_of(torch.device("mtia"))  # of no kind
    assert device.kind == device.torch_type == "mtia"
    assert device.vendor_backend is None
    assert not device.vendor_supports(torch.float32, "SUM")
    assert device.torch_device(3) == torch.device("mtia", 3)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("absent", "plug_out:Device", "ModuleNotFoundError: No module named 'plug_out'"),
        ("absent", "plug_in:Absent", "AttributeError: .*Absent"),
        ("broken", "plug_in:Broken", "OSError: libvendor.so: cannot open"),
        ("little", "plug_in:Little", "TypeError: the class does not derive from .*Device"),
        ("other", "plug_in:Good", "TypeError: the class has kind 'good'"),
        ("Good", "plug_in:Good", "TypeError: a kind's name must consist of lower-case letters"),
        ("auto", "plug_in:Good", "TypeError: a kind's name must consist of lower-case letters"),
    ],
)
def test_a_faulty_kind_is_one_line_for_those_who_ask_for_it(install, kind, value, reason):
    known = install(**{kind: value})
    assert list(known.devices) == [*ACCELERATORS, "cpu"]
    assert choose_device("auto", {**known.counts, "cuda": 0}, 0, 1, "h").kind == "cpu"
    with pytest.raises(UserError, match=reason) as raised:
        choose_device(f"{kind}:0", known.counts, 0, 1, "h", known.faults)
    text = str(raised.value)
    assert text.startswith(f"--devices {kind}:0: the device kind '{kind}' ({value}) cannot")
    assert text.endswith("; correct, update or remove the package that adds it")
    assert "\n" not in text
