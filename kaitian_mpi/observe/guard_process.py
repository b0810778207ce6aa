"""The process that gives the terminal back if the rank that draws on it dies, however it dies.

Started by `screen.py`, by path and without site packages, so that it starts in 15 ms::

    python -I -S guard_process.py kaitian-terminal RANK_PID > the terminal
"""

from __future__ import annotations

import os
import select
import signal
import sys

# All rows scroll again; the view stays where it is, and what follows comes below it.
RELEASE = b"\x1b[r\x1b[0m\x1b[999;1H\r\n"


def main() -> None:
    """Wait for the rank's end, then reset the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    poll = select.poll()
    try:
        assert hasattr(os, "pidfd_open")  # where it is missing, nothing is drawn
        poll.register(os.pidfd_open(int(sys.argv[2])), select.POLLIN)
        poll.poll()
    except ProcessLookupError:  # it has ended already
        pass
    os.write(1, RELEASE)


if __name__ == "__main__":
    main()
