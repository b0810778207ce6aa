"""`pytest tests/mpi` starts itself under mpirun, on the ranks that its tests need."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import start_ranks

THOROUGH = pytest.mark.thorough
TESTS = Path(start_ranks.__file__).parent


class Item:
    """A test of a file with these markers, from the nearest."""

    def __init__(self, file, *marks):
        self.path, self._marks = TESTS / file, [mark.mark for mark in marks]

    def iter_markers(self, name):
        return (mark for mark in self._marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


def anywhere(suite="mpi"):
    return Item(f"{suite}/test_a.py")


def on(*sizes, suite="mpi"):
    return Item(f"{suite}/test_a.py", pytest.mark.sizes(*sizes), pytest.mark.sizes(1, 2, 3, 4))


def on_at_least(least):
    return Item("mpi/test_a.py", pytest.mark.ranks(least))


@pytest.mark.parametrize(
    ("items", "ranks"),
    [
        ([anywhere()], 3),
        ([anywhere("vendor")], 4),
        ([on(2)], 2),
        ([on(1, 2), on(2, 3), on(3)], 3),
        ([on(1), on(1), on(3)], 1),
        ([on(2), anywhere()], 2),
        ([on_at_least(4), anywhere()], 4),
    ],
)
def test_most_of_the_tests_run(monkeypatch, items, ranks):
    assert command_for(monkeypatch, items)[:3] == ["mpirun", "-np", str(ranks)]


def test_arguments_are_passed_on_and_the_number_of_ranks_may_be_given(monkeypatch):
    command = command_for(monkeypatch, [on(1)], ranks=2)
    assert command[:3] == ["mpirun", "-np", "2"]
    assert command[4:] == ["-m", "pytest", "-s", "tests/mpi", "-k", "a b"]


def test_other_tests_run_where_they_are(monkeypatch):
    assert command_for(monkeypatch, [anywhere("unit")]) is None
    assert command_for(monkeypatch, [anywhere()], collectonly=True) is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1")
    assert command_for(monkeypatch, [anywhere()]) is None


def test_suites_are_started_one_at_a_time(monkeypatch):
    for other in ("vendor", "unit"):
        with pytest.raises(pytest.UsageError, match="a pytest of their own"):
            command_for(monkeypatch, [anywhere(), anywhere(other)])


def test_thorough_tests_are_left_out_where_their_numbers_of_ranks_say_so():
    at_all, on_3 = (Item("mpi/test_a.py", mark) for mark in (THOROUGH, THOROUGH(3)))
    assert [start_ranks.is_thorough(ranks, at_all) for ranks in (1, 3)] == [True, True]
    assert [start_ranks.is_thorough(ranks, on_3) for ranks in (1, 3)] == [False, True]
    assert not start_ranks.is_thorough(3, on(3))


def command_for(monkeypatch, items, ranks=None, collectonly=False):
    """Return the command that takes this process's place; None if none does."""
    commands = []
    monkeypatch.setattr(os, "execvpe", lambda _, command, __: commands.append(command))
    capture = SimpleNamespace(stop_global_capturing=lambda: None)
    start_ranks.pytest_runtestloop(
        SimpleNamespace(
            items=items,
            config=SimpleNamespace(
                option=SimpleNamespace(ranks=ranks, collectonly=collectonly),
                invocation_params=SimpleNamespace(args=("tests/mpi", "-k", "a b")),
                pluginmanager=SimpleNamespace(getplugin=lambda _: capture),
            ),
        )
    )
    return commands[0] if commands else None
