"""What the code keeps to one place, and that nothing which it reads or receives is run.

The rules read the code, so a call that should be safe and is not known to be is reported as well:
then say here why it is.
"""

import ast
import re
from collections import Counter

import pytest
from sources import FILES, ROOT, nodes

THE_FILE = ROOT / "runtime/mpi_libraries.py"
# Variables of MPI libraries and of their launchers, libfabric's included.
NAMES = re.compile(r"\b_?(OMPI|PRTE|PMIX|PMI|HYDRA|HYDI|MPIR|MPIEXEC|I_MPI|FI)_[A-Z]|\bMPI_LOCAL")


def strings(path):
    constants = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_one_file_names_mpi_libraries_and_one_package_asks_for_device_kinds_or_prints():
    assert {path for path in FILES if any(map(NAMES.search, strings(path)))} == {THE_FILE}
    quoted = re.compile(r"""["'](Open MPI|MPICH|hydra_pmi_proxy|prted|orted)["' ]""")
    assert {path for path in FILES if quoted.search(path.read_text())} == {THE_FILE}
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
    for path in FILES:
        place = path.relative_to(ROOT).parts[0]
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print" or place in ("cli", "observe"), path
            if isinstance(node, ast.Attribute) and node.attr in ("basicConfig", "StreamHandler"):
                assert place == "cli", path


def test_memory_that_mpi_accesses_by_its_address_belongs_to_a_variable():
    """Such a buffer keeps no tensor alive: the memory of a temporary one is used again."""
    for path in FILES:
        calls = (node for node in nodes(path) if isinstance(node, ast.Call))
        for call in calls:
            if ast.unparse(call.func) in ("as_buffer", "as_raw_buffer"):
                assert all(isinstance(a, ast.Name) for a in call.args), f"{path}:{call.lineno}"


# Interfaces, whose methods torch or this package's devices prescribe, may be larger.
LARGE = {"Accelerator", "CollectiveCalls", "Device", "KaitianProcessGroup", "MPIStore"}


def test_a_class_is_small_enough_to_have_one_idea():
    """Properties count as methods do; attributes are those that the methods set."""
    large = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                methods = [
                    statement for statement in node.body if isinstance(statement, ast.FunctionDef)
                ]
                if len(methods) > 20 or len(attributes_of(node)) > 15:
                    large.add(node.name)
    assert large == LARGE


# Names of other packages' objects, whose attributes may have the names of ours.
FOREIGN = {
    *("ctx", "chosen", "options", "error"),  # of autograd, argparse, process groups, Python
    *("model", "module", "norm", "parameter", "self._parameters[number]", "target"),  # torch's
    "whole",  # a copy of torch's DistributedSampler
    "self._sharded_class",  # a class of the object's own
}
# Sets a property, which a script may set as well.
PUBLIC = {"self._sampler.position"}


def test_no_code_sets_an_attribute_of_an_object_of_another_file():
    """An object changes itself, in its methods; the fields of a dataclass are there to be set."""
    own: dict[object, set[str]] = {path: set() for path in FILES}
    fields: set[str] = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                declared = {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                }
                is_record = any(
                    "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
                )
                fields |= declared if is_record else set()
                defaults = {
                    target.id
                    for statement in node.body
                    if isinstance(statement, ast.Assign)
                    for target in statement.targets
                    if isinstance(target, ast.Name)
                }
                own[path] |= attributes_of(node) | declared | defaults
    ours = set().union(*own.values()) - fields
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                text, receiver = ast.unparse(node), ast.unparse(node.value)
                if receiver in ("self", "cls", *FOREIGN) or text in PUBLIC:
                    continue
                assert node.attr not in ours - own[path], f"{path}:{node.lineno}: {text}"


def test_only_layouts_ask_which_layout_it_is():
    """Others ask its traits; config names it, and `balance` predicts it."""
    for path in FILES:
        place = path.relative_to(ROOT)
        if place.parts[0] in ("config", "cli", "balance") or place.parts[1:2] == ("layouts",):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not re.search(r"\bconfig\.layout\b|\blayout\.name\b", text), (path, text)


# What may name shards, stages' pipeline or mirrors: layouts, what chooses and predicts them, and
# what moves their data. The others below are to become fewer: of these, `integrations` means other
# packages' classes, and in `train` are a field of the summary and what a task may give a pipeline.
LAYOUT_PLACES = ("train/layouts/", "config/", "cli/", "balance/", "integrations/shard/")
NAMES_LAYOUTS = {
    *("distributed/gathering.py", "distributed/value_gathers.py", "distributed/shard_buckets.py"),
    *("distributed/shard_reducer.py", "distributed/sharded_model.py"),
    *("integrations/adaptive_forwards.py", "integrations/convert_experts.py"),
    *("integrations/planned_batches.py", "integrations/planned_loaders.py"),
    *("integrations/planned_streams.py", "train/summary.py", "train/task.py"),
}


def test_few_files_outside_of_layouts_name_one():
    places = {path.relative_to(ROOT).as_posix(): path for path in FILES}
    named = {
        place
        for place, path in places.items()
        if not place.startswith(LAYOUT_PLACES)
        and re.search("shard|pipeline|mirror", path.read_text(), re.IGNORECASE)
    }
    assert named == NAMES_LAYOUTS


def test_a_class_name_exists_once_in_the_package():
    names = Counter(
        node.name for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def attributes_of(node):
    stored = [
        target
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    ]
    return {target.attr for target in stored if ast.unparse(target.value) in ("self", "cls")}


def is_type_of_device(node):
    return isinstance(node, ast.Attribute) and node.attr == "type"


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
    *("connection", "self.connection"),  # sockets
    "self._messages('send')",  # Mailbox
    "type(self)",  # WeightedSum, whose hook DDP is given
    *("config", "self.config", "run.config"),  # TrainConfig: --allreduce
    "self._post",  # Post of the doctor, which sends JSON
}
ADMITTED = {
    "integrations/shard/extend_modules.py": {"torch.load"},  # replaced, with the script's arguments
    # One of torch's functions, from the file that torch itself was imported from.
    "distributed/registration.py": {"compile", "exec"},
    "observe/tensor_files.py": {"pickle", "pickle.UnpicklingError"},  # to catch it
}


def imported_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the full names of the names that a file imports."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            whole = [(a, a.name if a.asname else a.name.partition(".")[0]) for a in node.names]
            names |= {alias.asname or name: name for alias, name in whole}
    return names


def is_unsafe(name: str) -> bool:
    parts = name.split(".")
    return (
        parts[0] in UNPICKLERS
        or parts[-1] in OBJECT_COLLECTIVES
        or "read_pickle" in parts
        or any(name == word or name.startswith(f"{word}.") for word in FORBIDDEN)
    )


def unsafe(source: str) -> set[str]:
    """Return the full names of unsafe functions that a file uses."""
    nodes = list(ast.walk(ast.parse(source)))  # a call comes before its parts
    imported = imported_names(nodes)
    used, unsafe_names, safe = {*imported.values()}, set(), set()

    def full_name(node: ast.expr) -> str:
        root, dot, rest = ast.unparse(node).partition(".")
        return imported.get(root, root) + dot + rest

    for node in nodes:
        if isinstance(node, ast.Call):
            name = full_name(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name == "torch.load" and given.get("weights_only") == "True":
                safe.add(node.func)
            if name == "numpy.load" and len(node.args) > 2:
                unsafe_names.add("allow_pickle")
            unsafe_names |= {
                w for w in ("allow_pickle", "shell") if given.get(w, "False") != "False"
            }
        elif isinstance(node, (ast.Name, ast.Attribute)) and node not in safe:
            used.add(full_name(node))
        if isinstance(node, ast.Attribute) and node.attr in MPI_PICKLING:
            receiver = ast.unparse(node.value)
            is_module = receiver.partition(".")[0] in imported
            of_mpi = full_name(node).startswith("mpi4py.")
            if (of_mpi or not is_module) and receiver not in {"self", *NO_COMMUNICATORS}:
                unsafe_names.add(f"{receiver}.{node.attr}")
    return unsafe_names | set(filter(is_unsafe, used))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_executes_nothing_that_it_reads(path):
    admitted = ADMITTED.get(path.relative_to(ROOT).as_posix(), set())
    assert unsafe(path.read_text()) == admitted


def test_unsafe_code_is_detected_and_safe_code_is_not():
    for code, expected in (
        ("import pickle", "pickle"), ("from pickle import loads; loads(b'')", "pickle.loads"),
        ("from marshal import load", "marshal.load"), ("eval('1')", "eval"), ("run = exec", "exec"),
        ("import torch; torch.load('f')", "torch.load"),
        ("import torch as t; t.load('f', weights_only=False)", "torch.load"),
        ("from torch import load; load('f', weights_only=w)", "torch.load"),
        ("import torch; read = torch.load", "torch.load"), ("comm.bcast(1)", "comm.bcast"),
        ("import numpy as np; np.load('f', allow_pickle=True)", "allow_pickle"),
        ("import numpy as np; np.load('f', None, True)", "allow_pickle"),
        ("import pandas; pandas.read_pickle('f')", "pandas.read_pickle"),
        ("import subprocess; subprocess.Popen('ls', shell=flag)", "shell"),
        ("import os; os.system('ls')", "os.system"), ("partial(lane.send, 1)", "lane.send"),
        ("import torch.distributed as dist; dist.all_gather_object([], 1)", "all_gather_object"),
        ("self._comm.allgather(1)", "_comm.allgather"), ("a.Dup().gather(1)", "a.Dup().gather"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.scatter([1])", "MPI.COMM_WORLD.scatter"),
        ("import mpi4py.MPI; mpi4py.MPI.COMM_WORLD.recv()", "COMM_WORLD.recv"),
    ):  # fmt: skip
        assert any(expected in name for name in unsafe(code)), code
    for code in (
        "model.eval(); import re; re.compile('a'); import functools; functools.reduce(f, a)",
        "import torch; torch.load('f', weights_only=True)['a']",
        "import numpy as np; np.load('f', allow_pickle=False); np.load('f', 'r')",
        "import subprocess; subprocess.run(['ls']); subprocess.run(['ls'], shell=False)",
        "comm.Bcast(a); comm.Allgather(a, b); comm.Send(a, 0); comm.Isend(a, 0); message.Recv(a)",
        "from kaitian_mpi.mpi import host_collectives; host_collectives.gather(comm, a, b, 0)",
        "import torch.distributed as dist; dist.scatter(a); dist.all_gather_into_tensor(a, b)",
        "self.allreduce(a); self._messages('send').send(a, 0, 0)",
        "from mpi4py import MPI; MPI.COMM_WORLD.Scatter(a, b)",
    ):
        assert unsafe(code) == set()
