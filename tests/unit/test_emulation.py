"""What is emulated: flags, environment variables, and ranks that differ in them."""

from types import SimpleNamespace

import pytest

from kaitian_mpi.devices.emulation import KINDS_VARIABLE, SLOWDOWN_VARIABLE, check_slowdown_on
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi import emulation
from kaitian_mpi.mpi.emulation import Emulation, agree_on_emulation


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
        monkeypatch.setattr(
            emulation, "gather_values", lambda comm, own: [own] * (1 + same) + ranks
        )
        return agree_on_emulation(SimpleNamespace(size=size), *flags)

    return agree


def test_nothing_is_emulated_without_flags_and_variables(agree):
    for variables in (("", ""), (None, None), (" ", "\t\n")):
        found = agree(("", ""), variables)
        assert found == Emulation(schedules=((), ()))
        assert found.describe() == ""
        assert not found.is_from_environment


def test_variables_apply_where_there_is_no_flag(agree):
    found = agree(("", ""), (" gpu, mlu ", "1:3"))
    assert found.labels == ("gpu", "mlu")
    assert found.schedules == ((), ((0, 3.0),))
    assert found.describe() == "device kinds gpu, mlu; rank 1 slowed 3x"
    assert found.is_from_environment
    found = agree(("a,b", "0:2"), ("gpu", "9:nan"))  # those are not even read
    assert (found.kinds, found.slowdown) == ("a,b", "0:2")
    assert not found.is_from_environment
    found = agree(("a,b", ""), ("gpu", "1:2@9"))
    assert (found.kinds, found.slowdown, found.has_steps) == ("a,b", "1:2@9", True)
    assert found.is_from_environment


def test_a_rank_without_the_variable_takes_the_others_value(agree):
    """mpirun passes variables on to other hosts only if told to."""
    assert agree(("", ""), (None, None), ["", "", "gpu,mlu", "1:3"]) == agree(
        ("", ""), ("gpu,mlu", "1:3"), ["", "", "", ""]
    )


@pytest.mark.parametrize(
    ("flags", "variables", "other", "message"),
    [
        (
            ("", ""),
            ("a,b", ""),
            ["", "", "b,a", ""],
            "KAITIAN_EMULATE_KINDS: rank 0: found 'a,b'; rank 1: found 'b,a'; needed the same on "
            "every rank; correct it",
        ),
        (
            ("", "1:2"),
            ("", ""),
            ["", "", "", "1:3"],
            "--emulate-slowdown: rank 0: found '1:2'; rank 1: found ''; needed the same on every "
            "rank; correct it",
        ),
        (
            ("", ""),
            ("gpu", ""),
            ["", "", "", ""],
            "KAITIAN_EMULATE_KINDS gpu: found 1 kind, needed 2, one per rank; give as many as "
            "mpirun -np starts",
        ),
        (
            ("", ""),
            ("", "2:3"),
            ["", "", "", ""],
            "KAITIAN_EMULATE_SLOWDOWN: found '2:3', needed rank:factor or rank:factor@step with a "
            "rank from 0 to 1 and a factor from 1 to 1e6, such as 1:3.0@50",
        ),
        (
            ("a,b,c", ""),
            ("a,b", ""),
            ["a,b,c", "", "", ""],
            "--emulate-kinds a,b,c: found 3 kinds, needed 2, one per rank; give as many as mpirun "
            "-np starts",
        ),
    ],
)
def test_an_error_names_the_flag_or_the_variable(agree, flags, variables, other, message):
    with pytest.raises(AgreedError) as caught:
        agree(flags, variables, other)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("label", ["[/red]", "a b", "a\nb", "é", "\udcff", "x:1"])
def test_a_label_that_would_spoil_tables_and_files_is_refused(agree, label):
    with pytest.raises(AgreedError, match=r"KAITIAN_EMULATE_KINDS: found the kind '") as caught:
        agree(("", ""), (f"gpu,{label}", ""))
    assert str(caught.value).encode()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", ["1:0", "1:-2", "1:nan", "1:inf", "1:1e300", "-1:2", "1", "1:", ":2", "1:2@", "1:2@x"]
)
def test_a_malformed_slowdown_in_a_variable_is_refused(agree, entry):
    with pytest.raises(AgreedError, match=f"KAITIAN_EMULATE_SLOWDOWN: found '{entry}', needed"):
        agree(("", ""), ("", f"0:2, {entry} ,"))


def test_many_ranks_are_described_in_a_line(agree):
    slow = ",".join(f"{rank}:2" for rank in range(100))
    kinds = ",".join(f"k{rank}" for rank in range(100))
    text = agree((kinds, slow), ("", ""), size=100).describe()
    assert text.endswith("rank 7 slowed 2x and 92 more")
    assert "k7 and 92 more; rank 0 slowed 2x," in text


def test_an_accelerator_cannot_be_slowed_down():
    slow = ((), ((0, 3.0),))
    check_slowdown_on(True, "cpu", slow)
    check_slowdown_on(False, "cuda:0", ((), ((0, 1.0),)))
    with pytest.raises(UserError, match=r"^V: found a cuda:0 rank, needed CPU ranks only; give"):
        check_slowdown_on(False, "cuda:0", slow, "V")
