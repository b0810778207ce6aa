"""Starts Python commands as forks of a process that has torch loaded.

Loading torch, what it loads for an optimizer, for DistributedDataParallel and to compile, and this
package takes each rank longer than most tests take. This process loads all that once and forks each
rank, before MPI or threads have started. `forked_rank.py` is what mpirun starts; it stands for the
rank.

The process of which `multiprocessing` forks a rank's data loading workers is forked here, too.

Unlike a fresh process, a forked rank is not the launcher's child, Python's hash seed is the same on
all ranks, and at its end what exit handlers leave is not freed object by object, which takes longer
than many tests. Tests of how processes start and end or of what is imported start fresh ones.

    python fork_server.py SOCKET [MODULE...]

It ends at the end of its standard input. It may itself be a fork that loads more modules.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import json
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
import weakref
from contextlib import suppress
from pathlib import Path

PRELOADED = (
    *("numpy", "pytest", "sklearn.datasets", "rich.console", "rich.table", "psutil", "mpi4py"),
    *("torch", "torch._dynamo", "torch.distributed.device_mesh", "torch.nn.parallel"),
    *("torch.distributed._functional_collectives", "torch.distributed.optim", "torch.utils.data"),
    *("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch.export"),
    *(
        "kaitian_mpi.distributed.data_parallel",
        "kaitian_mpi.distributed.startup",
        "kaitian_mpi.cli.train",
    ),
    *("kaitian_mpi.recipes.image_classification", "kaitian_mpi.train.training"),
    # What most ranks import later, as far as it starts no MPI.
    *("kaitian_mpi.recipes.images", "kaitian_mpi.recipes.user_task"),
    *("kaitian_mpi.balance.forecast", "kaitian_mpi.balance.pipeline_plan"),
    *("kaitian_mpi.distributed.creation", "kaitian_mpi.distributed.collectives.work"),
    *("kaitian_mpi.distributed.relay.chunking", "kaitian_mpi.train.evaluation"),
    *("kaitian_mpi.train.divergence", "kaitian_mpi.train.results"),
    *("kaitian_mpi.train.measure.exclusion", "kaitian_mpi.train.measure.parity"),
    *("kaitian_mpi.train.layouts.pipeline.chain", "kaitian_mpi.train.layouts.shard.memory_budget"),
    "torch.utils.serialization",
)
MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 32
HUGE_PAGE_BYTES = 1 << 21
MADV_COLLAPSE = 25
LIBRARY_FOLDERS = sys.path[1:]
STAND_IN = ("-I", "-S", str(Path(__file__).absolute().with_name("forked_rank.py")))


def main():
    for name in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(name)
    assert "mpi4py.MPI" not in sys.modules  # each rank starts it
    # Linking it takes longer than starting it.
    ctypes.CDLL(importlib.util.find_spec("mpi4py.MPI").origin)
    gc.freeze()  # the forks share the memory of these objects
    use_huge_pages()
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # what torch's modules hold ends with the process
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(sys.argv[1])
        server.listen(64)
        print("ready", flush=True)
        command = serve(server)
    end(exit_code(command))


def use_huge_pages():
    """Gather this process's own memory in huge pages: a fork copies an entry for each page."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *file = line.split()
        if rights.startswith("rw") and file in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in place.split("-"))
            begin += -begin % HUGE_PAGE_BYTES
            for address in range(begin, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
                # An older kernel does not know it.
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE_BYTES), MADV_COLLAPSE)


def serve(server):
    """Fork a process for each request; return its command in that process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([server, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = server.accept()
        if os.fork() == 0:
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
    request = json.loads(request)
    pid = os.fork()
    if pid == 0:
        connection.close()
        server.close()
        take_over(request, descriptors)
        return request["command"]
    for descriptor in (server.fileno(), *descriptors, 0, 1, 2):
        os.close(descriptor)
    watch(pid, connection, request["launcher"], request["environ"])
    os._exit(0)


def watch(pid, connection, launcher, environ):
    """Report a rank's pid and how it ends; kill it when the process that stands for it is gone."""
    with suppress(OSError):  # the rank has ended
        os.setpgid(pid, pid)
    # To the rank, this process is the launcher: it may send SIGTERM, or write to its stderr.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(launcher, signal.SIGTERM))
    with suppress(OSError):
        os.dup2(os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND), 2)
    connection.send(b"%d" % pid)
    ready, _, _ = select.select([os.pidfd_open(pid), connection], [], [])
    if connection in ready:
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    if log := environ.get("KAITIAN_TEST_CPU"):  # of `bin/test`: no other process can tell
        with suppress(OSError), open(log, "a") as file:
            file.write(f"{used.ru_utime + used.ru_stime:.2f}\n")
    with suppress(OSError):
        connection.send(b"%d" % os.waitstatus_to_exitcode(status))


def take_over(request, descriptors):
    """Make this process what the one that it stands for would have become."""
    os.setpgid(0, 0)
    join_host_of(request["pid"])
    os.sched_setaffinity(0, request["cores"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    # What started this server, such as a shell's background job, may have SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    above = max(request["descriptors"]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(request["descriptors"], moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.stdout.reconfigure(
        line_buffering=os.isatty(1), write_through="PYTHONUNBUFFERED" in os.environ
    )
    faulthandler.register(signal.SIGRTMIN, all_threads=True)  # see `finish` in jobs.py
    sys.modules["numpy"].random.seed()  # Python's own generator is seeded at each fork
    fork_loading_processes(sys.argv[1])


def fork_loading_processes(path):
    """Have `multiprocessing` fork its own fork server, which would load torch again."""
    start = multiprocessing.util.spawnv_passfds

    def start_or_fork(program, words, descriptors):
        is_fork_server = "multiprocessing.forkserver" in words[-1]
        stand_in = [program, *STAND_IN, path] if is_fork_server else []
        return start(program, [*stand_in, *words], descriptors)

    multiprocessing.util.spawnv_passfds = start_or_fork


def join_host_of(pid):
    """Move this process to a process's cgroup and namespaces, such as those of an emulated host."""
    groups = [set(Path(f"/proc/{each}/cgroup").read_text().splitlines()) for each in (pid, "self")]
    for line in groups[0] - groups[1]:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu", "cpu,cpuacct"):
            Path(f"/sys/fs/cgroup/{controllers}{path}/cgroup.procs").write_text("0")
    for name in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{name}") as theirs, open(f"/proc/self/ns/{name}") as ours:
            if os.fstat(theirs.fileno()).st_ino != os.fstat(ours.fileno()).st_ino:
                assert ctypes.CDLL(None).setns(theirs.fileno(), 0) == 0


def exit_code(command):
    """Run a command; return the code, or minus the signal, with which it ends."""
    try:
        run(command)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code):
    """End as Python does, but for freeing what this process holds."""
    flush = sys.stdout.flush, sys.stderr.flush
    for leave in (threading._shutdown, atexit._run_exitfuncs, *flush, finalize_mpi):
        try:
            leave()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def finalize_mpi():
    """Finalize MPI where mpi4py would, at the very end of a process."""
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py"].rc.finalize is not False:
        mpi = sys.modules["mpi4py.MPI"]
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()


def run(command):
    """Run Python with a script, `-m module` or `-c code`, or a program written in Python."""
    program, *arguments = command
    imported = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if program == sys.executable and arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:] = [os.getcwd(), *imported, *LIBRARY_FOLDERS]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if program == sys.executable and "-c" in arguments:
        at = arguments.index("-c") + 1
        sys.argv = ["-c", *arguments[at + 1 :]]
        sys.path[:] = ["", *imported, *LIBRARY_FOLDERS]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[at], main.__dict__)
        return
    sys.argv = arguments if program == sys.executable else [shutil.which(program), *arguments]
    script = Path(sys.argv[0])
    sys.path[:] = [str(script.resolve().parent), *imported, *LIBRARY_FOLDERS]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(script)
    exec(compile(script.read_bytes(), main.__file__, "exec"), main.__dict__)


if __name__ == "__main__":
    main()
