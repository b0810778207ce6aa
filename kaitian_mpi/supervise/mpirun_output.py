"""Reads what mpirun and its ranks write to stderr; holds back what MPI says of a job's end.

Open MPI ends a failed job with up to 25 lines, after what the job itself has said of it. They are
kept, so that they can be shown if the job has said nothing.
"""

from __future__ import annotations

import re

_RULE = b"-" * 74  # before and after each of Open MPI's messages
_AFTER_MESSAGE = b"\0"
_MOST_LINES = 40
_LONGEST_START = 200
_ABOUT_THE_END = re.compile(
    rb"MPI_ABORT was invoked on rank"
    rb"|(prterun|mpirun|mpiexec|prte|orterun)( has)? "
    rb"(exited due to process|detected that one or more|noticed that)"
    rb"|Primary job +terminated normally"
    rb"|Sorry! +You were supposed to get help about"
)
_REPEATED = re.compile(
    rb'\[[^\]]+\] (\d+ more process(es)? ha(s|ve) sent help message|Set MCA parameter ")'
)
_ERROR = re.compile(
    rb"\berror: |\bTraceback \(most recent call last\)|; ending (the job|this rank)"
    rb"|ended before MPI started"
)
_SIGNAL = re.compile(
    rb"process rank (\d+) with PID \d+ on node (\S+)\s+exited\s+on\s+signal\s+(\d+)\s+\(([^)]*)\)"
)
_EXIT_CODE = re.compile(rb"Process name:\s+\[\S+,\s*(\d+)\]\s+Exit code:\s+(\d+)")
_ABORT_OF_MPICH = re.compile(rb"Abort\(\d+\) on node \d+ .*application called MPI_Abort\(")
_ABORT = re.compile(rb"MPI_ABORT was invoked on rank (\d+)")


class MpirunOutput:
    """The stderr of a job, read part by part.

    `token` is what a rank writes when its work is done (`report_end`); it is not shown. It begins
    with a character that is not used otherwise.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._rest = b""  # an incomplete line, if it may become a rule or the token
        self._line = b""  # the start of a line that is shown already
        self._message: list[bytes] = []  # the lines of a message of MPI that is incomplete
        self._held: list[bytes] = []
        self.has_finished = False
        """Whether a rank has reported that its work is done."""
        self.has_error = False
        """Whether the job itself has said why it ends."""

    def read(self, data: bytes) -> bytes:
        """Return the output to show, after more was written."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = b""
        shown = b"".join(self._read_line(line + b"\n") for line in lines)
        may_be_held = rest.startswith((b"[", b"A"))
        if self._message or self._token[:1] in rest or may_be_held:
            start = b""
        else:
            start = rest.rstrip(b"-")
        self._rest = rest[len(start) :]
        return shown + self._shown(start)

    def flush(self) -> bytes:
        """Return what was kept until its end is read, if that has not come for a while."""
        unread = b"".join(self._message) + self._rest
        self._message = []
        self._rest = b""
        return self._shown(unread)

    @property
    def held(self) -> bytes:
        """MPI's messages about the job's end."""
        return b"".join(self._held)

    @property
    def cause(self) -> str:
        """The rank that has ended the job, and its exit; empty if MPI has not named it."""
        if match := _SIGNAL.search(self.held):
            rank, host, number, name = (word.decode(errors="replace") for word in match.groups())
            return f"rank {rank} on {host} was killed by signal {number} ({name})"
        if match := _EXIT_CODE.search(self.held):
            return f"rank {int(match[1])} ended with exit code {int(match[2])}"
        if match := _ABORT.search(self.held):
            return f"rank {int(match[1])} called MPI_Abort"
        return ""

    def _read_line(self, line: bytes) -> bytes:
        line = line.replace(_AFTER_MESSAGE, b"")
        if self._token in line:
            self.has_finished = True
            line = line.replace(self._token + b"\n", b"")
        before, rule, after = line.rpartition(_RULE)
        if rule and not after.strip() and not before.endswith(b"-"):
            return self._shown(before) + self._read_rule(rule + after)
        if self._message:
            self._message.append(line)
            return self.flush() if len(self._message) > _MOST_LINES else b""
        if _ABORT_OF_MPICH.match(line) or (_REPEATED.match(line) and self._held):
            self._held.append(line)
            return b""
        return self._shown(line)

    def _read_rule(self, rule: bytes) -> bytes:
        message = b"".join([*self._message, rule])
        if not self._message:
            self._message = [rule]
            return b""
        self._message = []
        if _ABOUT_THE_END.search(message):
            self._held.append(message)
            return b""
        return self._shown(message)

    def _shown(self, text: bytes) -> bytes:
        text = text.replace(_AFTER_MESSAGE, b"")
        line = self._line + text
        self.has_error = self.has_error or bool(_ERROR.search(line))
        self._line = line.rpartition(b"\n")[2][-_LONGEST_START:]
        return text
