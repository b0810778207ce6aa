"""The package's source files, each parsed once, for the tests that read the code."""

import ast
import functools
from pathlib import Path

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))
