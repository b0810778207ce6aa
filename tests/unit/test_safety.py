"""Nothing that the package reads or receives is run: no unpickling, no eval, no shell.

The rules read the code, so a call that should be safe and is not known to be is reported as well:
then say here why it is.
"""

import ast
from pathlib import Path

import pytest

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent

# Modules whose loading functions can execute code.
UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.load", "torch.hub", "torch.jit.load", "mpi4py.MPI.pickle"),
}
# Methods of torch.distributed and of MPI's communicators and messages that pickle.
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
MPI_PICKLING = {
    *("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv"),
    *("mprobe", "improbe", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce"),
    *("allreduce", "scan", "exscan", "neighbor_allgather", "neighbor_alltoall"),
}
# Objects that have such a method but are no communicators, besides modules and `self`.
NO_COMMUNICATORS = {
    *("host", "super()"),  # HostOperations
    "library",  # a vendor's process group
    "self._mailbox",  # Mailbox
    "self._backend",  # a vendor's process group
    "state",  # WeightedSum, in DDP's hook
    *("config", "self.config", "run.config"),  # TrainConfig: --allreduce
    "self._post",  # Post of the doctor, which sends JSON
}
ADMITTED = {
    # One of torch's functions, from the file that torch itself was imported from.
    "distributed/registration.py": {"compile", "exec"},
    "observe/tensor_files.py": {"pickle", "pickle.UnpicklingError"},  # to catch it
}


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for a name or an attribute of one; other expressions as source text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full names of the names that a file imports."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


class Search(ast.NodeVisitor):
    """Collects the full names of unsafe functions that a file uses."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.found: set[str] = set()
        self.imported = imported_names(tree)
        for name in self.imported.values():
            self.judge(name)
        self.visit(tree)

    def full_name(self, node: ast.expr) -> str:
        root, dot, rest = dotted(node).partition(".")
        return self.imported.get(root, root) + dot + rest

    def judge(self, name: str) -> None:
        parts = name.split(".")
        if parts[0] in UNPICKLERS or parts[-1] in OBJECT_COLLECTIVES or "read_pickle" in parts:
            self.found.add(name)
        if any(name == word or name.startswith(f"{word}.") for word in FORBIDDEN):
            self.found.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        self.judge(self.full_name(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.judge(self.full_name(node))
        receiver = dotted(node.value)
        root = receiver.partition(".")[0]
        of_module = root in self.imported and not self.full_name(node).startswith("mpi4py.")
        if (
            node.attr in MPI_PICKLING
            and not of_module
            and receiver not in {"self", *NO_COMMUNICATORS}
        ):
            self.found.add(f"{receiver}.{node.attr}")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.full_name(node.func)
        given = {word.arg: word.value for word in node.keywords}
        if name == "numpy.load" and len(node.args) > 2:
            self.found.add("allow_pickle")
        for word in ("allow_pickle", "shell"):
            if word in given and not is_constant(given[word], False):
                self.found.add(word)
        if name != "torch.load" or not is_constant(given.get("weights_only"), True):
            self.visit(node.func)
        for child in (*node.args, *node.keywords):
            self.visit(child)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_executes_nothing_that_it_reads(path):
    admitted = ADMITTED.get(path.relative_to(ROOT).as_posix(), set())
    assert Search(path.read_text()).found == admitted


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p; p.loads(b'')", "pickle.loads"),
        ("from pickle import loads as read; read(b'')", "pickle.loads"),
        ("from marshal import load", "marshal.load"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import torch; torch.load('f')", "torch.load"),
        ("import torch as t; t.load('f', weights_only=False)", "torch.load"),
        ("from torch import load; load('f', weights_only=w)", "torch.load"),
        ("import torch; read = torch.load", "torch.load"),
        ("import numpy as np; np.load('f', allow_pickle=True)", "allow_pickle"),
        ("import numpy as np; np.load('f', None, True)", "allow_pickle"),
        ("import pandas; pandas.read_pickle('f')", "pandas.read_pickle"),
        ("import subprocess; subprocess.run('ls', shell=True)", "shell"),
        ("import subprocess; subprocess.Popen('ls', shell=flag)", "shell"),
        ("import os; os.system('ls')", "os.system"),
        ("import torch.distributed as dist; dist.all_gather_object([], 1)", "all_gather_object"),
        ("comm.bcast(1)", "comm.bcast"),
        ("self._comm.allgather(1)", "self._comm.allgather"),
        ("partial(lane.send, 1)", "lane.send"),
        ("comm.Dup().gather(1)", "comm.Dup().gather"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.scatter([1])", "MPI.COMM_WORLD.scatter"),
        ("import mpi4py.MPI; mpi4py.MPI.COMM_WORLD.recv()", "COMM_WORLD.recv"),
        ("message.recv()", "message.recv"),
    ],
)
def test_unsafe_code_is_detected(code, found):
    assert any(found in name for name in Search(code).found)


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import re; re.compile('a')",
        "import torch; torch.load('f', weights_only=True)['a']",
        "import numpy as np; np.load('f', allow_pickle=False); np.load('f', 'r')",
        "import subprocess; subprocess.run(['ls']); subprocess.run(['ls'], shell=False)",
        "comm.Bcast(a); comm.Allgather(a, b); comm.Send(a, 0); comm.Isend(a, 0); message.Recv(a)",
        "from kaitian_mpi.mpi import host_collectives; host_collectives.gather(comm, a, b, 0)",
        "import torch.distributed as dist; dist.scatter(a); dist.all_gather_into_tensor(a, b)",
        "import functools; functools.reduce(f, a)",
        "self.allreduce(a); self._mailbox.send(a, 0, 0)",
        "from mpi4py import MPI; MPI.COMM_WORLD.Scatter(a, b)",
    ],
)
def test_safe_code_is_not_reported(code):
    assert Search(code).found == set()
