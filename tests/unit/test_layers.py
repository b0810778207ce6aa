"""Imports only go down the layers of the package."""

import ast
import functools
import graphlib
from collections import Counter
from pathlib import Path

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent
# From the top; a package imports only from those below it.
FLOORS = (
    "cli",
    "doctor",
    "recipes",
    "supervision",
    "dashboard",
    "report",
    "training",
    "checkpoint",
    "steps",
    "benchmark",
    "engine",
    "elastic",
    "datasets",
    "models",
    "terminal",
    "metrics",
    "output",
    "data",
    "gradients",
    "backend",
    "collectives",
    "relay",
    "network",
    "wire",
    "mpi",
    "checks",
    "launch",
    "tracing",
    "runtime",
    "devices",
    "balance",
    "factory",
    "config",
    "system",
    "errors",
)
MAX_FILES = 15  # per package, without its __init__.py
MAX_SHARE = 0.15  # of the package's lines


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def package_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere in it, for types too."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
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
        found |= {n.removeprefix("kaitian_mpi.") for n in names if n.startswith("kaitian_mpi.")}
    return found


def room(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_is_in_a_package_and_imports_go_down():
    for module, path in modules().items():
        if not module:
            continue
        assert room(module) in FLOORS, f"{path}: in no room"
        for name in package_imports(path):
            is_below = FLOORS.index(room(name)) > FLOORS.index(room(module))
            assert is_below or room(name) == room(module), f"{path} imports {name}"


def test_modules_of_one_package_have_no_import_cycles():
    graph = {
        module: {name for name in package_imports(path) if room(name) == room(module)} - {module}
        for module, path in modules().items()
        if module
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
    else:
        cycle = []
    assert not cycle


def test_no_package_is_too_large():
    lines, files = Counter(), Counter()
    for module, path in modules().items():
        lines[room(module)] += len(path.read_text().splitlines())
        files[room(module)] += path.name != "__init__.py"
    for name in FLOORS:
        assert files[name] <= MAX_FILES, f"{name}/ has {files[name]} files"
        assert lines[name] <= MAX_SHARE * lines.total(), f"{name}/ has {lines[name]} lines"


def imported_packages(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    froms = {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    return froms | {
        a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names
    }


def test_the_lowest_layers_import_neither_torch_nor_mpi():
    for place in (
        "balance",
        "supervision",
        "report",
        "launch",
        "config",
        "errors.py",
        "factory.py",
        "metrics",
        "tracing",
        "output/files.py",
        "output/folders.py",
        "output/loopback.py",
        "dashboard",
        "training/summary.py",
    ):
        paths = [ROOT / place] if place.endswith(".py") else list((ROOT / place).rglob("*.py"))
        for path in paths:
            assert not imported_packages(path) & {"torch", "mpi4py"}, path


def test_only_the_mpi_packages_and_type_hints_import_mpi4py():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in ("mpi", "network", "runtime"):
            continue
        for node in ast.parse(path.read_text()).body:  # TYPE_CHECKING blocks are not in the body
            assert not (isinstance(node, ast.ImportFrom) and node.module == "mpi4py"), path
