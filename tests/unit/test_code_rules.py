"""What the code keeps to one place: MPI libraries' names, device kinds, and printing."""

import ast
import re

from sources import FILES, ROOT, nodes

THE_FILE = ROOT / "runtime/mpi_libraries.py"
# Variables of MPI libraries and of their launchers, libfabric's included.
NAMES = re.compile(r"\b_?(OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|MPIR|MPIEXEC|I_MPI|FI)_[A-Z]|\bMPI_LOCAL")


def strings(path):
    constants = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_only_one_file_names_the_variables_of_mpi_libraries():
    found = {path for path in FILES if any(map(NAMES.search, strings(path)))}
    assert found == {THE_FILE}


def test_no_other_file_compares_with_a_librarys_name():
    quoted = re.compile(r"""["'](Open MPI|MPICH|hydra_pmi_proxy|prted|orted)["' ]""")
    found = {path for path in FILES if quoted.search(path.read_text())}
    assert found == {THE_FILE}


def is_type_of_device(node):
    return isinstance(node, ast.Attribute) and node.attr == "type"


def test_no_other_module_asks_what_kind_a_device_is():
    for path in FILES:
        for node in nodes(path) if path.parent != ROOT / "devices" else ():
            if isinstance(node, ast.Constant):
                assert node.value not in ("cuda", "xpu", "nccl"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                fixed = [side for side in sides if isinstance(side, ast.Constant | ast.Tuple)]
                assert not (fixed and any(map(is_type_of_device, sides))), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr != "get_device_module", f"{path}:{node.lineno}"
                named = isinstance(node.value, ast.Name) and node.value.id == "torch"
                assert not (named and node.attr in ("cuda", "xpu")), f"{path}:{node.lineno}"


def test_only_cli_and_observe_print():
    for path in FILES:
        place = path.relative_to(ROOT).parts[0]
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print" or place in ("cli", "observe"), path
            if isinstance(node, ast.Attribute) and node.attr in ("basicConfig", "StreamHandler"):
                assert place == "cli", path
