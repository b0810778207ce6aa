"""Imports only go down the layers of the package."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest
from sources import FILES, ROOT, nodes, tree

# From the top; a subpackage imports only from those below it. `errors.py` belongs to none.
FLOORS = (
    *("cli", "recipes", "integrations", "supervise", "train", "distributed", "observe", "mpi"),
    *("preflight", "devices", "runtime", "balance", "config", "errors"),
)
MAX_SUBPACKAGES = 13
TESTS = Path(__file__).parents[1]


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below the package."""
    paths = {}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__")] = path
    return paths


@functools.cache
def package_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere in it, for types too."""
    known, imported = modules(), set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("kaitian_mpi.") in known else node.module
                for name in whole
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        imported |= {n.removeprefix("kaitian_mpi.") for n in names if n.startswith("kaitian_mpi.")}
    return imported


def subpackage(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_is_in_a_package_and_imports_go_down():
    for module, path in modules().items():
        if not module:
            continue
        assert subpackage(module) in FLOORS, f"{path}: in no subpackage"
        for name in package_imports(path):
            is_below = FLOORS.index(subpackage(name)) > FLOORS.index(subpackage(module))
            assert is_below or subpackage(name) == subpackage(module), f"{path} imports {name}"


def test_modules_of_one_package_have_no_import_cycles():
    graph = {
        module: {name for name in package_imports(path) if subpackage(name) == subpackage(module)}
        - {module}
        for module, path in modules().items()
        if module
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a cycle


def test_the_package_has_few_subpackages():
    assert len(FLOORS) - 1 <= MAX_SUBPACKAGES


def imported_packages(path: Path) -> set[str]:
    imports = list(nodes(path))
    froms = {n.module.split(".")[0] for n in imports if isinstance(n, ast.ImportFrom) and n.module}
    return froms | {
        a.name.split(".")[0] for n in imports if isinstance(n, ast.Import) for a in n.names
    }


def test_the_lowest_layers_import_neither_torch_nor_mpi():
    for place in (
        *("balance", "supervise", "config", "errors.py", "observe/report", "observe/timeline"),
        *("observe/files.py", "observe/folders.py", "observe/reading.py", "observe/sink.py"),
        "train/summary.py",
    ):
        paths = [ROOT / place] if place.endswith(".py") else list((ROOT / place).rglob("*.py"))
        for path in paths:
            assert not imported_packages(path) & {"torch", "mpi4py"}, path


def test_only_the_mpi_packages_and_type_hints_import_mpi4py():
    for path in FILES:
        place = path.relative_to(ROOT)
        if place.parts[0] in ("mpi", "runtime") or place.parent.name == "network":
            continue
        for node in tree(path).body:  # TYPE_CHECKING blocks are not in the body
            assert not (isinstance(node, ast.ImportFrom) and node.module == "mpi4py"), path


def test_the_modules_that_the_tests_load_in_advance_exist():
    """By the source: to import the fork server's modules takes seconds."""
    names = set(re.findall(r'"(kaitian_mpi\.[\w.]+)"', (TESTS / "fork_server.py").read_text()))
    assert len(names) > 10
    for name in names:
        path = ROOT.parent / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


@pytest.mark.parametrize("name", ["start_watch_process", "watchdog_process"])
def test_a_process_that_every_rank_starts_imports_little(name):
    """Others take longer to import than Python to start."""
    cheap = {"__future__", "collections.abc", "contextlib", "os", "select", "signal", "sys", "time"}
    imported = set()
    for node in tree(ROOT / f"runtime/{name}.py").body:
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported <= cheap
