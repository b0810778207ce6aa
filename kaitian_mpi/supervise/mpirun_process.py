"""Runs mpirun for `kaitian-train -n` and `kaitian-run -n`, as the process that was started.

The command replaces itself by this script, which has one thread when it blocks signals: a library
that the command has loaded may have started others, and the system would give the signals to them.
mpirun stays in the same process group. So it reads from the terminal, and gets Ctrl-C and Ctrl-Z
from there, as if the user had started it.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # without site-packages, which take longer to find than all the rest
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from kaitian_mpi.runtime import FORKS_AT
from kaitian_mpi.runtime.forked_rank import address_of
from kaitian_mpi.runtime.system import die_with_parent
from kaitian_mpi.supervise.mpirun_output import MpirunOutput

_STOPS = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (*_STOPS, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SEC = 0.05
_IDLE_SEC = 0.3
_END_SEC = 1.0
_READ_BYTES = 1 << 16
_BACKLOG = 1024  # at least the number of ranks


def main() -> None:
    """Run `argv[4:]` for the command `argv[1]`, whose ranks end with the token `argv[2]`.

    `argv[3]` is the number of ranks to be forked, see `start_forking`; 0: none.
    """
    program, token, forked, *words = sys.argv[1:]
    output = MpirunOutput(token)
    try:
        code, stopped = run(words, output, (program, forked) if int(forked) else ())
    except OSError as error:
        show(f"{program}: error: {words[0]}: {error.strerror}; install another MPI\n".encode())
        sys.exit(2)
    if stopped and not (code == 0 and output.has_finished):
        sys.exit(128 + stopped)
    sys.exit(report_end(program, code, output))


def run(words: Sequence[str], output: MpirunOutput, forks: Sequence[str] = ()) -> tuple[int, int]:
    """Run mpirun and show what it writes; return its exit code, and the signal that ended it.

    `forks` are the arguments of the process that forks the ranks; empty: there is none.
    """
    # If it is inherited as ignored, the kernel neither sends it nor keeps mpirun's exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    awaited.add(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    prepare = partial(_prepare, before, os.getpid())
    read_end, write_end = os.pipe()
    forking = start_forking(forks, write_end, prepare) if forks else None
    child = subprocess.Popen(  # noqa: S603  # a list of words, no shell
        words, stderr=write_end, preexec_fn=prepare
    )
    os.close(write_end)
    reader = threading.Thread(target=_show_output, args=(read_end, output), daemon=True)
    reader.start()
    stopped = 0
    while (code := child.poll()) is None:
        info = signal.sigwaitinfo(awaited)
        if info.si_signo in _STOPS:
            stopped = stopped or info.si_signo
        # The terminal gives a Ctrl-C to mpirun as well, for which a second one means: at once.
        if info.si_signo != signal.SIGCHLD and info.si_code <= 0:
            child.send_signal(info.si_signo)
    if forking is not None and forking.stdin is not None:
        forking.stdin.close()
        forking.terminate()  # as long as it still loads, this ends it
    # What saves the last step may outlive mpirun, and tells it here; another signal ends the wait.
    while reader.is_alive():
        reader.join(_POLL_SEC)
        if signal.sigtimedwait(awaited - {signal.SIGCHLD}, 0):
            break
    if forking is not None:
        with suppress(subprocess.TimeoutExpired):
            forking.wait(_END_SEC)  # it ends with the last rank
    return (code if code >= 0 else 128 - code), stopped


def _prepare(mask: Iterable[int], parent: int) -> None:
    """Prepare the process of mpirun, or of what forks the ranks, before it is that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with_parent(signal.SIGTERM, parent)  # mpirun then ends its ranks


def start_forking(
    forks: Sequence[str], stderr: int, prepare: Callable[[], None]
) -> subprocess.Popen[bytes] | None:
    """Start the process that forks the ranks, `forking_process.py`; None if that fails."""
    name = f"kaitian-{secrets.token_hex(8)}"
    script = str(Path(__file__).absolute().parents[1] / "cli" / "forking_process.py")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address_of(name))
        os.environ[FORKS_AT] = name
        listener.listen(_BACKLOG)
        return subprocess.Popen(  # noqa: S603  # our own file, no shell
            [sys.executable, script, str(listener.fileno()), *forks],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[listener.fileno()],
            process_group=0,  # a Ctrl-C is for mpirun
            preexec_fn=prepare,
        )
    return None


def _show_output(descriptor: int, output: MpirunOutput) -> None:
    while True:
        if not select.select([descriptor], [], [], _IDLE_SEC)[0]:
            show(output.flush())
        elif data := os.read(descriptor, _READ_BYTES):
            show(output.read(data))
        else:
            show(output.flush())
            return


def report_end(program: str, code: int, output: MpirunOutput) -> int:
    """Say how the job has ended; return its exit code.

    mpirun's code is 0 if a host was lost, and with fault tolerance if all ranks were killed.
    """
    if not output.has_error or code == 0:
        show(output.held)
    if code == 0 and output.has_finished:
        return 0
    cause = output.cause
    if code == 0:
        code = 1
        cause = cause or "no rank has finished: all were killed, or their hosts were lost"
    separator = "; " if cause else ""
    show(f"{program}: {cause}{separator}the job ended with exit code {code}\n".encode())
    return code


def show(text: bytes) -> None:
    """Write to stderr, which may be closed already."""
    with suppress(OSError):
        while text:
            text = text[os.write(2, text) :]


if __name__ == "__main__":
    main()
