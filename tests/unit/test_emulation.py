"""Device kinds of other packages, and what is emulated: kinds, and slowdowns."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from kaitian_mpi.devices import device_of, known_kinds, pace, registry
from kaitian_mpi.devices.choice import choose_device
from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.devices.emulation import (
    KINDS_VARIABLE,
    SLOWDOWN_VARIABLE,
    Emulation,
    given_emulation,
    read_emulation,
)
from kaitian_mpi.devices.pace import CallPace, Pace
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.runtime.system import CommunicationThread

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
    kinds = install(
        idle="plug_in:Idle", good="plug_in:Good", cpu="plug_in:Good", npu="plug_in:Good"
    )
    assert {*kinds.devices} == {*ACCELERATORS, "good", "idle", "cpu"}
    for kind in ("cpu", "npu"):
        assert "there is another kind, or a built-in one, of this name" in kinds.faults.pop(kind)
    assert kinds.faults == {}
    # --devices auto prefers it to the CPU, as any accelerator.
    for devices, counts in (("good:1", {}), ("auto", {"cuda": 0})):
        assert choose_device(devices, {**kinds.counts, **counts}, 0, 1, "h").kind == "good"
    for torch_type, kind in (("meta", "good"), ("cpu", "cpu")):
        assert device_of(torch.device(torch_type)) is kinds.devices[kind]
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
    kinds = install(**{kind: value})
    assert list(kinds.devices) == [*ACCELERATORS, "cpu"]
    assert choose_device("auto", {**kinds.counts, "cuda": 0}, 0, 1, "h").kind == "cpu"
    with pytest.raises(UserError, match=reason) as raised:
        choose_device(f"{kind}:0", kinds.counts, 0, 1, "h", kinds.faults)
    text = str(raised.value)
    assert text.startswith(f"--devices {kind}:0: the device kind '{kind}' ({value}) cannot")
    assert text.endswith("; correct, update or remove the package that adds it")
    assert "\n" not in text


@pytest.fixture
def agree(monkeypatch):
    """Agree on a rank's flags and variables with ranks that have others."""

    def agree(flags=("", ""), variables=("", ""), *others, size=2):
        for name, value in zip((KINDS_VARIABLE, SLOWDOWN_VARIABLE), variables, strict=True):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        ranks = [list(other) for other in others]
        same = size - 1 - len(ranks)
        return read_emulation([given_emulation(*flags)] * (1 + same) + ranks)

    return agree


def test_variables_apply_where_there_is_no_flag_and_errors_name_it(agree):
    for variables in (("", ""), (None, None), (" ", "\t\n")):
        agreed = agree(("", ""), variables)
        assert (agreed, agreed.describe()) == (Emulation(schedules=((), ())), "")
    agreed = agree(("", ""), (" gpu, mlu ", "1:3"))
    assert agreed.labels == ("gpu", "mlu")
    assert agreed.schedules == ((), ((0, 3.0),))
    assert agreed.describe() == "device kinds gpu, mlu; rank 1 slowed 3x"
    agreed = agree(("a,b", "0:2"), ("gpu", "9:nan"))  # those are not even read
    assert (agreed.kinds, agreed.slowdown) == ("a,b", "0:2")
    agreed = agree(("a,b", ""), ("gpu", "1:1@90,1:2.5@9"))
    slowed = "rank 1 slowed 2.5x from step 9, 1x from step 90"
    assert (
        agreed.describe() == f"device kinds a, b; {slowed} (steps are counted by a Training only)"
    )
    # mpirun passes variables on to other hosts only if told to.
    assert agree(("", ""), (None, None), ["gpu,mlu", "1:3"]) == agree(("gpu,mlu", "1:3"))
    for kinds, slowdown, other, message in (
        ("a,b", "", ["b,a", ""], "--emulate-kinds differs between ranks: 'a,b' on rank 0, 'b,a'"),
        ("a,b,c", "", ["a,b,c", ""], "--emulate-kinds a,b,c: give one kind per rank; mpirun has"),
        ("gpu,", "", ["gpu,", ""], "--emulate-kinds 'gpu,': a kind is missing beside a comma"),
        ("", "2:3", ["", ""], "--emulate-slowdown: '2:3' is not a slowdown; write rank:factor or"),
    ):
        with pytest.raises(AgreedError) as caught:
            agree((kinds, slowdown), ("", ""), other)
        assert str(caught.value).startswith(message)
        assert caught.value.exit_code == 2
    for kinds, slowdown, message in (
        *((f"gpu,{label}", "", "--emulate-kinds: '.*' cannot be") for label in SPOIL),
        *(("", f"0:2, {entry} ,", f"--emulate-slowdown: '{entry}' is not") for entry in MALFORMED),
    ):
        with pytest.raises(AgreedError, match=message) as caught:
            agree(("", ""), (kinds, slowdown))
        assert str(caught.value).encode()
        assert "\n" not in str(caught.value)


SPOIL = "[/red]", "a b", "a\nb", "é", "\udcff", "x:1"
MALFORMED = "1:0 1:-2 1:nan 1:inf 1:1e300 -1:2 1 1: :2 1:2@ 1:2@x".split()


def wrapped(kinds="", slowdown="", device=None, rank=1, **more):
    emulation = read_emulation([[kinds, slowdown]] * 2)
    return emulation.wrap(device or CpuDevice(), rank, "cuda:0", **more)


def test_a_device_is_its_own_but_for_its_emulated_kind_and_pace():
    plain = CpuDevice()
    assert wrapped(device=plain) is wrapped(slowdown="0:1", device=plain) is plain
    device = wrapped("gpu,mlu", "1:3")
    assert (device.kind, device.torch_type, device.is_host) == ("mlu", "cpu", True)
    assert str(device.torch_device(0)) == "cpu"
    assert (device.pace.factor, wrapped("gpu,mlu", "1:3", rank=0).pace.factor) == (3.0, 1.0)
    calls = CallPace()
    again = wrapped("gpu,mlu", "1:2", device=device, calls=calls)
    assert isinstance(again.device, CpuDevice)
    assert (again.pace.factor, again.calls) == (2.0, calls)
    gpu = SimpleNamespace(is_host=False, kind="cuda")
    assert wrapped(slowdown="1:1", device=gpu) is gpu
    with pytest.raises(UserError, match=r"^--emulate-slowdown: only CPU ranks can be slowed"):
        wrapped(slowdown="1:3", device=gpu, rank=0)


class Clock:
    """Stands for the module `time`."""

    used_sec = slept_sec = 0.0

    def thread_time(self):
        return self.used_sec

    def sleep(self, seconds):
        self.slept_sec += seconds

    def compute(self, seconds):
        self.used_sec += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_a_slowed_step_sleeps_in_proportion_to_what_it_computes(clock):
    slowdown = Pace(((0, 2.0), (50, 3.0), (90, 1.0)))
    clock.compute(7)
    slowdown.start()
    for step, slept in ((0, 0.1), (49, 0.2), (50, 0.4), (89, 0.6), (90, 0.6)):
        slowdown.go_to(step)
        clock.compute(0.1)
        slowdown.catch_up()
        assert clock.slept_sec == pytest.approx(slept)


def test_only_the_time_between_calls_of_a_thread_counts_whatever_they_are(clock):
    """Two calls, such as those of two groups or of one and its messages, have one measurement."""
    slowdown = CallPace(((0, 3.0), (50, 9.0)))  # the factor from the start
    first = slowdown.around(lambda: clock.compute(5))  # MPI spins in the caller's thread
    second = slowdown.around(lambda text: text)
    clock.compute(7)
    first()  # starts the measurement
    assert clock.slept_sec == 0
    clock.compute(0.1)
    assert second("result") == "result"
    assert clock.slept_sec == pytest.approx(0.2)
    first()
    clock.compute(0.02)
    first()
    assert clock.slept_sec == pytest.approx(0.24)
    clock.compute(5)
    slowdown.forget()  # the creation of a group does not count
    first()
    clock.compute(0.01)
    first()
    assert clock.slept_sec == pytest.approx(0.26)
    slowdown.pause()  # nor a Training, which slows its own steps
    for _ in range(3):
        first()
        clock.compute(1)
    slowdown.resume()
    first()
    clock.compute(0.01)
    first()
    assert clock.slept_sec == pytest.approx(0.28)
    for schedule in ((), ((0, 1.0),), ((0, 1.0), (0, 1.0))):  # not slowed: the method itself
        assert CallPace(schedule).around(first) is first
    clock.slept_sec = 0.0
    slowdown = CallPace(((0, 3.0),))
    call = slowdown.around(lambda: None)
    call()
    clock.compute(1)

    def compute_and_call():
        call()
        clock.compute(0.1)
        call()

    for kind, slept in ((CommunicationThread, 0), (threading.Thread, 0.2)):
        thread = kind(target=compute_and_call)
        thread.start()
        thread.join()
        assert clock.slept_sec == pytest.approx(slept)
