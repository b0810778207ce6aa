"""The package's source files, each parsed once, for the tests that read the code."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(tree(path))
