"""Prints how Open MPI's launcher says that the job's ranks are, for `start_watch_process.py`.

python -I -S rank_states_process.py LAUNCHER ADDRESS JOB PREFIX

It asks by PMIx, with the PMIx library of the process LAUNCHER, and without the variables that begin
with PREFIX, by which it would be taken for a rank. One line a rank, `rank host
ended|running|connected`; nothing if there is no answer. Imports little, and is a process of its
own: PMIx starts threads, and may wait.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (
    POINTER,
    Structure,
    Union,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_void_p,
)

# Keys and types of pmix_common.h; a release that changes them has another name of the library.
_SERVER = b"pmix.srvr.uri"
_TABLE = b"pmix.qry.ptable"
_OF_JOB = b"pmix.nspace"
_LIBRARY = "/libpmix.so.2"
_STRING = 3
_PROC_INFO = 38
_DATA_ARRAY = 39
_UNDEFINED = 0
_CONNECTED = 6
_TERMINATED = 20


class Proc(Structure):
    """pmix_proc_t."""

    _fields_ = (("job", c_char * 256), ("rank", c_uint32))


class Variable(Structure):
    """pmix_envar_t, the longest member of a value."""

    _fields_ = (("name", c_char_p), ("text", c_char_p), ("separator", c_char))


class Data(Union):
    """The union in pmix_value_t."""

    _fields_ = (("string", c_char_p), ("pointer", c_void_p), ("longest", Variable))


class Value(Structure):
    """pmix_value_t."""

    _fields_ = (("type", c_uint16), ("data", Data))


class Info(Structure):
    """pmix_info_t."""

    _fields_ = (("key", c_char * 512), ("flags", c_uint32), ("value", Value))


class Query(Structure):
    """pmix_query_t."""

    _fields_ = (("keys", POINTER(c_char_p)), ("qualifiers", POINTER(Info)), ("number", c_size_t))


class Array(Structure):
    """pmix_data_array_t."""

    _fields_ = (("type", c_uint16), ("size", c_size_t), ("array", c_void_p))


class ProcInfo(Structure):
    """pmix_proc_info_t."""

    _fields_ = (
        ("proc", Proc), ("host", c_char_p), ("program", c_char_p), ("pid", c_int),
        ("exit_code", c_int), ("state", c_uint8),
    )  # fmt: skip


def text_info(key: bytes, text: str) -> Info:
    """Return an entry whose value is a text."""
    info = Info(key=key)
    info.value.type = _STRING
    info.value.data.string = text.encode()
    return info


def launchers_library(launcher: int) -> str:
    """Return the path of the launcher's PMIx library; "" if it has none of this interface."""
    with open(f"/proc/{launcher}/maps") as file:
        return next((line.split()[-1] for line in file if _LIBRARY in line), "")


def ask(library: str, address: str, job: str) -> list[ProcInfo]:
    """Return a launcher's facts about a job's ranks; nothing if it does not answer."""
    pmix = ctypes.CDLL(library)
    entry = (Info * 1)(text_info(_SERVER, address))
    if pmix.PMIx_tool_init(ctypes.byref(Proc()), entry, c_size_t(1)):
        return []
    keys = (c_char_p * 2)(_TABLE, None)
    query = Query(keys, (Info * 1)(text_info(_OF_JOB, job)), 1)
    answer = POINTER(Info)()
    number = c_size_t()
    code = pmix.PMIx_Query_info(
        ctypes.byref(query), c_size_t(1), ctypes.byref(answer), ctypes.byref(number)
    )
    ranks = []
    if not code and number.value and answer[0].value.type == _DATA_ARRAY:
        table = ctypes.cast(answer[0].value.data.pointer, POINTER(Array)).contents
        if table.type == _PROC_INFO:
            processes = ctypes.cast(table.array, POINTER(ProcInfo))
            ranks = [processes[index] for index in range(table.size)]
    pmix.PMIx_tool_finalize()
    return ranks


def main(launcher: str, address: str, job: str, prefix: str) -> None:
    """Print the states of the job's ranks."""
    library = launchers_library(int(launcher))
    if not library:
        return
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]
    lines = []
    for rank in ask(library, address, job):
        # PRRTE up to 3.0 says "undefined" of one that has ended with code 0 (`TERMINATED` is
        # missing in its `prte_pmix_convert_state`), and of one that is not started, without a pid.
        ended = rank.state >= _TERMINATED or (rank.state == _UNDEFINED and rank.pid > 0)
        state = "connected" if rank.state == _CONNECTED else "ended" if ended else "running"
        lines.append(f"{rank.proc.rank} {(rank.host or b'?').decode()} {state}")
    sys.stdout.write("\n".join(lines))
    sys.stdout.flush()
    os._exit(0)  # PMIx's threads may not end


if __name__ == "__main__":
    main(*sys.argv[1:])
