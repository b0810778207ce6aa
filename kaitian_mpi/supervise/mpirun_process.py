"""Runs mpirun for `kaitian-train -n` and `kaitian-run -n`, as the process that was started.

The command replaces itself by this script, which has one thread when it blocks signals: a library
that the command has loaded may have started others, and the system would give the signals to them.
mpirun stays in the same process group. So it reads from the terminal, and gets Ctrl-C and Ctrl-Z
from there, as if the user had started it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # without site-packages, which take longer to find than all the rest
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from kaitian_mpi.runtime.system import die_with_parent
from kaitian_mpi.supervise.mpirun_output import MpirunOutput

_STOPS = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (*_STOPS, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SEC = 0.05
_IDLE_SEC = 0.3
_READ_BYTES = 1 << 16


def main() -> None:
    """Run `argv[3:]` for the command `argv[1]`, whose ranks end with the token `argv[2]`."""
    program, token, *words = sys.argv[1:]
    output = MpirunOutput(token)
    try:
        code, stopped = run(words, output)
    except OSError as error:
        show(f"{program}: error: {words[0]}: {error.strerror}; install another MPI\n".encode())
        sys.exit(2)
    if stopped and not (code == 0 and output.has_finished):
        sys.exit(128 + stopped)
    sys.exit(report_end(program, code, output))


def run(words: Sequence[str], output: MpirunOutput) -> tuple[int, int]:
    """Run mpirun and show what it writes; return its exit code, and the signal that ended it."""
    # If it is inherited as ignored, the kernel neither sends it nor keeps mpirun's exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    awaited.add(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = subprocess.Popen(  # noqa: S603  # a list of words, no shell
        words, stderr=subprocess.PIPE, preexec_fn=partial(_prepare, before, os.getpid())
    )
    reader = threading.Thread(target=_show_output, args=(child, output), daemon=True)
    reader.start()
    stopped = 0
    while (code := child.poll()) is None:
        info = signal.sigwaitinfo(awaited)
        if info.si_signo in _STOPS:
            stopped = stopped or info.si_signo
        # The terminal gives a Ctrl-C to mpirun as well, for which a second one means: at once.
        if info.si_signo != signal.SIGCHLD and info.si_code <= 0:
            child.send_signal(info.si_signo)
    # What saves the last step may outlive mpirun, and tells it here; another signal ends the wait.
    while reader.is_alive():
        reader.join(_POLL_SEC)
        if signal.sigtimedwait(awaited - {signal.SIGCHLD}, 0):
            break
    return (code if code >= 0 else 128 - code), stopped


def _prepare(mask: Iterable[int], parent: int) -> None:
    """Prepare the process of mpirun, before it is mpirun."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with_parent(signal.SIGTERM, parent)  # mpirun then ends its ranks


def _show_output(child: subprocess.Popen[bytes], output: MpirunOutput) -> None:
    assert child.stderr is not None
    descriptor = child.stderr.fileno()
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
