"""A port of this host for one user: reachable from this host only, and with a token.

Every user of the host can connect to 127.0.0.1: the token in the address keeps the others out.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import socket
import time

from kaitian_mpi.errors import UserError

HOST = "127.0.0.1"
_TOKEN_BYTES = 16
_BACKLOG = 32
_MAX_PORT = 65_535
_RETRY_SEC = 0.05


def listen_on_loopback(port: int, flag: str, wait_sec: float = 1.0) -> socket.socket:
    """Return a socket that listens on 127.0.0.1.

    Args:
        port: 0 for any free one.
        flag: the command-line flag, for the error.
        wait_sec: for how long to try: a job that has just been killed may still hold the port.

    Raises:
        UserError: the number is not a port's, or the port is in use or needs root.
    """
    if not 0 <= port <= _MAX_PORT:
        raise UserError(f"{flag}: found {port}, needed a port from 0 to {_MAX_PORT}")
    deadline = time.monotonic() + wait_sec
    while True:
        try:
            return _listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                reason = error.strerror or str(error)
                raise UserError(
                    f"{flag} {port}: {reason} on {HOST}; give a free port from 1024 to 65535, or "
                    "0 for any free one"
                ) from error
        time.sleep(_RETRY_SEC)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Allows a port that a job has just closed, but never one in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def make_token(secret: str = "") -> str:
    """Return a token for the address, without which nothing is answered.

    Args:
        secret: what to derive it from, so that it is the same next time; empty for a random one.
    """
    if not secret:
        return secrets.token_urlsafe(_TOKEN_BYTES)
    return hmac.new(secret.encode(), b"kaitian-dashboard", hashlib.sha256).hexdigest()[:32]


def show_address(port: int, token: str) -> None:
    """Print the address to open in a browser, and how to reach it from another computer."""
    print(
        f"dashboard: http://{HOST}:{port}/{token}/ (from another computer: "
        f"ssh -L {port}:{HOST}:{port} {socket.gethostname()})",
        flush=True,
    )
