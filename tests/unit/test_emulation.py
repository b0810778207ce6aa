"""What is emulated: flags, environment variables, and ranks that differ in them."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.devices.cpu import CpuDevice
from kaitian_mpi.devices.emulation import (
    KINDS_VARIABLE,
    SLOWDOWN_VARIABLE,
    Emulation,
    given_emulation,
    read_emulation,
)
from kaitian_mpi.devices.pace import CallPace
from kaitian_mpi.errors import AgreedError, UserError


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


def test_variables_apply_where_there_is_no_flag(agree):
    for variables in (("", ""), (None, None), (" ", "\t\n")):
        found = agree(("", ""), variables)
        assert (found, found.describe()) == (Emulation(schedules=((), ())), "")
    found = agree(("", ""), (" gpu, mlu ", "1:3"))
    assert found.labels == ("gpu", "mlu")
    assert found.schedules == ((), ((0, 3.0),))
    assert found.describe() == "device kinds gpu, mlu; rank 1 slowed 3x"
    found = agree(("a,b", "0:2"), ("gpu", "9:nan"))  # those are not even read
    assert (found.kinds, found.slowdown) == ("a,b", "0:2")
    found = agree(("a,b", ""), ("gpu", "1:1@90,1:2.5@9"))
    slowed = "rank 1 slowed 2.5x from step 9, 1x from step 90"
    assert found.describe() == f"device kinds a, b; {slowed} (steps are counted by a Training only)"
    # mpirun passes variables on to other hosts only if told to.
    assert agree(("", ""), (None, None), ["gpu,mlu", "1:3"]) == agree(("gpu,mlu", "1:3"))


@pytest.mark.parametrize(
    ("kinds", "slowdown", "other", "message"),
    [
        ("a,b", "", ["b,a", ""], "--emulate-kinds differs between ranks: 'a,b' on rank 0, 'b,a'"),
        ("a,b,c", "", ["a,b,c", ""], "--emulate-kinds a,b,c: give one kind per rank; mpirun has"),
        ("", "2:3", ["", ""], "--emulate-slowdown: '2:3' is not a slowdown; write rank:factor or"),
    ],
)
def test_an_error_names_the_flag(agree, kinds, slowdown, other, message):
    with pytest.raises(AgreedError) as caught:
        agree((kinds, slowdown), ("", ""), other)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


SPOIL = "[/red]", "a b", "a\nb", "é", "\udcff", "x:1"
MALFORMED = "1:0 1:-2 1:nan 1:inf 1:1e300 -1:2 1 1: :2 1:2@ 1:2@x".split()


@pytest.mark.parametrize(
    ("kinds", "slowdown", "message"),
    [
        *((f"gpu,{label}", "", "--emulate-kinds: '.*' cannot be") for label in SPOIL),
        *(("", f"0:2, {entry} ,", f"--emulate-slowdown: '{entry}' is not") for entry in MALFORMED),
    ],
)
def test_labels_that_would_spoil_tables_and_malformed_slowdowns_are_refused(
    agree, kinds, slowdown, message
):
    with pytest.raises(AgreedError, match=message) as caught:
        agree(("", ""), (kinds, slowdown))
    assert str(caught.value).encode()
    assert "\n" not in str(caught.value)


def wrapped(kinds="", slowdown="", device=None, rank=1, **more):
    emulation = read_emulation([[kinds, slowdown]] * 2)
    return emulation.wrap(device or CpuDevice(), rank, "cuda:0", **more)


def test_a_device_is_its_own_but_for_its_emulated_kind_and_pace():
    own = CpuDevice()
    assert wrapped(device=own) is wrapped(slowdown="0:1", device=own) is own
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
