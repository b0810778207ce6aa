"""Takes away what only Linux has, as on macOS: in every Python process whose PYTHONPATH has this.

The names are those that typeshed, and so `mypy --platform darwin`, does not know there. Files are
taken away from this package alone; psutil, for one, is made for the system that it is installed on.
"""

import ctypes
import fcntl
import os
import socket
import sys
import time

NAMES = {
    os: "sched_getaffinity sched_setaffinity sched_setscheduler SCHED_IDLE pidfd_open memfd_create "
    "MFD_CLOEXEC eventfd posix_fadvise copy_file_range splice".split(),
    fcntl: ["F_SETPIPE_SZ", "F_GETPIPE_SZ"],
    socket: ["SO_PEERCRED"],
    time: ["CLOCK_BOOTTIME"],
}
STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"
FUNCTIONS = ("prctl", "mallopt")
FOLDERS = ("/proc/", "/sys/", "/dev/shm")

for module, names in NAMES.items():
    for name in names:
        vars(module).pop(name, None)

find_function = ctypes.CDLL.__getattr__


def without_functions(library: ctypes.CDLL, name: str) -> object:
    if name in FUNCTIONS:
        raise AttributeError(name)
    return find_function(library, name)


def without_files(event: str, args: tuple) -> None:
    if event not in ("open", "os.listdir") or not str(args[0]).startswith(FOLDERS):
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((STANDARD_LIBRARY, "<frozen")):
        frame = frame.f_back
    if frame is not None and "/kaitian_mpi/" in frame.f_code.co_filename:
        raise FileNotFoundError(2, "not on this system", str(args[0]))


ctypes.CDLL.__getattr__ = without_functions
sys.addaudithook(without_files)
