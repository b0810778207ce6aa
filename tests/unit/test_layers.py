"""Imports go only down the floors of the house."""

import ast
from pathlib import Path

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent
FLOORS = {
    "cli": 8,
    "supervision": 7,
    "training": 6,
    "data": 5,
    "models": 5,
    "collectives": 4,
    "mpi": 3,
    "devices": 2,
    "balance": 1,
    "config": 0,
    "errors": -1,  # under everything
    "factory": 0,
    "snapshot_folder": 0,
    "new_folder": 0,
}


def package_imports(path: Path) -> set[str]:
    """Return the names directly under kaitian_mpi that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("kaitian_mpi.")}
    return found


def test_every_file_has_a_floor_and_imports_go_down():
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if place == "__init__":
            continue
        assert place in FLOORS, f"{path}: on no floor"
        for name in package_imports(path):
            assert name == place or FLOORS[name] < FLOORS[place], f"{path} imports {name}"


def imported_packages(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    froms = {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    return froms | {
        a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names
    }


def test_the_lowest_floors_know_neither_torch_nor_mpi():
    for place in (
        "balance",
        "supervision",
        "config.py",
        "errors.py",
        "factory.py",
        "new_folder.py",
        "snapshot_folder.py",
    ):
        paths = [ROOT / place] if place.endswith(".py") else list((ROOT / place).rglob("*.py"))
        for path in paths:
            assert not imported_packages(path) & {"torch", "mpi4py"}, path


def test_only_the_mpi_floor_and_type_hints_import_mpi4py():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] == "mpi":
            continue
        for node in ast.parse(path.read_text()).body:  # TYPE_CHECKING blocks are not in the body
            assert not (isinstance(node, ast.ImportFrom) and node.module == "mpi4py"), path
