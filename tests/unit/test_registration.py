"""The effects of `import torch` where the package is installed, in subprocesses, and logging."""

import json
import logging
import os
import subprocess
import sys

import pytest

# What is there after `import torch`; the number of threads after each of several calls, minus
# torch's own; and what is there after all public names are imported.
SEEN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers
ours = sorted(name for name in sys.modules if name.startswith("kaitian_mpi"))
seen = {
    "mpi4py": "mpi4py" in sys.modules,
    "backends": list(dist.Backend.backend_list),
    "schemes": sorted(_rendezvous_handlers),
    "ours": ours,
}
from kaitian_mpi.runtime.system import set_default_threads
given = torch.get_num_threads()
os.environ.pop("OMP_NUM_THREADS", None)
used = [set_default_threads(given + 1), torch.get_num_threads(), set_default_threads(given + 2)]
torch.set_num_threads(given + 5)
used += [set_default_threads(given), torch.get_num_threads()]
torch.set_num_threads(given + 2)  # as our own default
os.environ["OMP_NUM_THREADS"] = str(given + 2)  # as the user has set it before
used.append(set_default_threads(given + 1))
os.environ["KAITIAN_OMP_NUM_THREADS"] = str(given + 2)  # as this package has
used.append(set_default_threads(given + 1))
seen["threads"] = [threads - given for threads in used]
import kaitian_mpi
from kaitian_mpi import *
seen["public"] = [kaitian_mpi.Training.__name__, "mpi4py.MPI" in sys.modules]
print(json.dumps(seen))
"""


def run(code, **env):
    words = [sys.executable, *([code] if code.endswith(".py") else ["-c", code])]
    env = {**os.environ, **env}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_importing_torch_registers_the_backend_and_loads_nothing_else():
    ended = run(SEEN)
    assert ended.stderr == ""
    seen = json.loads(ended.stdout)
    assert "kaitian" in seen["backends"]
    assert "mpi" in seen["schemes"]
    assert not seen["mpi4py"]
    # The modules that register, and their packages.
    backend, runtime = "kaitian_mpi.distributed", "kaitian_mpi.runtime"
    names = [backend, f"{backend}.registration", runtime, f"{runtime}.system"]
    assert seen["ours"] == ["kaitian_mpi", *names]
    # A number set by the script is kept, and one set by the user.
    assert seen["threads"] == [1, 1, 2, 5, 5, 2, 1]
    # MPI starts in `init` or `Training`, once its settings are made and its end is taken over.
    assert seen["public"] == ["Training", False]


# What a program that never asks for the backend can see of it. Its objects are described by name.
ELSEWHERE = """
import atexit, gc, json, logging, os, signal, sys, threading, warnings
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

def outcome(call):
    try:
        return call()
    except Exception as error:
        return str(error).splitlines()[0]

def in_group(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group, part = dist.group.WORLD, dist.new_group([0])
    seen = {
        "backend": dist.get_backend(),
        "names": [group.name(), part.name()],
        "default": outcome(lambda: str(group._get_backend_name())),
        "number": outcome(part._get_sequence_number_for_group),
        "hooks": outcome(group._has_hooks),
        "hook": outcome(lambda: group._register_on_completion_hook(print)),
        "pending": outcome(group._wait_for_pending_works),
        "reduced": outcome(lambda: dist.all_reduce(torch.ones(2))),
    }
    dist.destroy_process_group()
    return seen

def process():
    return {
        "modules": sorted(name for name in sys.modules if not name.startswith("kaitian_mpi")),
        "variables": sorted(os.environ),
        "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
        "files": len(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "hooks": [sys.excepthook.__module__, threading.excepthook.__module__, atexit._ncallbacks()],
        "rest": [str(warnings.filters), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()],
        "logs": [str(logging.root.handlers), sorted(map(str, logging.root.manager.loggerDict))],
    }

if __name__ == "__main__":
    backend = dist.Backend
    seen = {"process": process()}
    functions = {name: value for name, value in vars(dist).items() if callable(value)}
    seen["functions"] = {n: hasattr(f, "__wrapped__") for n, f in sorted(functions.items())}
    seen["registered"] = [list(backend._plugins), len(backend._plugins), bool(backend._plugins)]
    seen["defaults"] = dict(backend.default_device_backend_map)
    for name in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None):
        seen[f"group {name}"] = in_group(name)
    seen["unknown"] = outcome(lambda: in_group("cpu:unknown"))
    backend.register_backend("own", print, devices=["acme"])
    seen["own"] = [backend.default_device_backend_map["acme"], list(backend._plugins)]
    ours = ("kaitian", "mpi", "KAITIAN")
    places = (backend.backend_list, backend.backend_type_map, backend.backend_capability)
    for number, place in enumerate((*places, vars(backend), _rendezvous_handlers)):
        seen[f"names {number}"] = [str(name) for name in place if name not in ours]
    print(json.dumps(seen))
"""


@pytest.mark.thorough
def test_a_program_that_never_asks_for_the_backend_sees_no_difference(tmp_path):
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    without, with_ours = (
        # The last line: torch 2.8's gloo prints lines of its own.
        json.loads(run(str(script), TORCH_DEVICE_BACKEND_AUTOLOAD=autoload).stdout.splitlines()[-1])
        for autoload in ("0", "1")
    )
    assert without["group cpu:gloo,cuda:gloo"]["names"] == ["gloo", "gloo"]
    assert with_ours == without


SCRIPT = """
import logging, sys
from kaitian_mpi.cli.logs import configure_logging
log = logging.getLogger("kaitian_mpi.train.checkpoint.files")
for level, rank in ("info", 0), ("info", 1), ("debug", 1), ("error", 0):
    configure_logging(level, "[3@node-b]", rank)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("step %d", 7)
    logging.getLogger("other").warning("not ours")
sys.stderr.close()
log.error("nobody reads this")
print("still here")
"""


def test_rank_0_logs_at_the_level_and_the_others_log_warnings():
    info, warning = "[3@node-b] step 7", "[3@node-b] warning: step 7"
    debug, error = "[3@node-b] debug: step 7", "[3@node-b] error: step 7"
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stderr.splitlines() == [
        *(info, warning, error, "not ours"), *(warning, error, "not ours"),
        *(debug, info, warning, error, "not ours"), *(error, "not ours"),
    ]  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_an_import_leaves_the_scripts_own_logging_as_it_is(caplog):
    logger = logging.getLogger("kaitian_mpi")
    assert logger.handlers == []
    assert logger.propagate
    logging.getLogger("kaitian_mpi.train.checkpoint.files").warning(
        "seen by the script's own handlers"
    )
    assert caplog.messages == ["seen by the script's own handlers"]
