"""Answers browsers: a few fixed, read-only addresses, all of which need the token.

The host's other users can connect as well, and other web pages that the user has open can send
requests. So nothing is answered without the token or under another host name, and nothing from a
request becomes a file path.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.dashboard.live_run import NARROW, WIDE, LiveRun
from kaitian_mpi.observe.dashboard.page import render_page, render_update

_TIMEOUT_SEC = 10.0
_MAX_CONNECTIONS = 32
# Any port: an ssh tunnel may use another one.
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_TEXT, _HTML, _JSON, _SVG = (
    *("text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"),
    "image/svg+xml",
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_STRICT_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_SVG_POLICY = f"{_STRICT_POLICY}; style-src 'unsafe-inline'; img-src data:"  # no script, no links


class DashboardServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves a run on a socket that is already listening."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, run: LiveRun, token: str) -> None:
        """Take over the socket.

        Args:
            listener: a listening socket on 127.0.0.1.
            run: the run to show.
            token: the first part of each address's path.
        """
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.run, self.token = run, token
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close the connection if there are too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed the connection."""


def serve_run(folder: Path, listener: socket.socket, token: str) -> None:
    """Serve the page of a run folder, forever.

    Args:
        folder: the run folder, which may still be empty.
        listener: a listening socket on 127.0.0.1.
        token: the first part of each address's path.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about its cache folder
    with DashboardServer(listener, LiveRun(folder), token) as server:
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: DashboardServer
    timeout = _TIMEOUT_SEC
    server_version, sys_version = "kaitian", ""

    def do_GET(self) -> None:
        """Answer with the page, its state or a figure."""
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "open this page as 127.0.0.1 or localhost\n")
            return
        path = self.path.partition("?")[0].removeprefix("/")
        token, slash, rest = path.partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._say(HTTPStatus.FORBIDDEN, "open the full address that the job printed\n")
        elif not slash:
            self._answer(
                HTTPStatus.PERMANENT_REDIRECT, _TEXT, b"", Location=f"/{self.server.token}/"
            )
        else:
            self._route(rest)

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self.do_GET()

    def _route(self, rest: str) -> None:
        run = self.server.run
        figures = {
            f"{folder}/{name}.svg": (name, width)
            for folder, width in (("figures", WIDE), ("narrow", NARROW))
            for name in run.specs
        }
        if rest == "":
            state, drawn = run.refresh()
            nonce = secrets.token_urlsafe(16)
            policy = (
                f"{_STRICT_POLICY}; connect-src 'self'; img-src 'self' data:; "
                f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
            )
            body = render_page(run, state, drawn, nonce).encode(errors="replace")
            self._answer(HTTPStatus.OK, _HTML, body, policy)
        elif rest == "update.html":
            body = render_update(run, *run.refresh()).encode(errors="replace")
            self._answer(HTTPStatus.OK, _HTML, body)
        elif rest == "state.json":
            state, drawn = run.refresh()
            content = {"version": state.version, "figures": drawn, "minutes": state.minutes_old}
            body = json.dumps(content).encode()
            self._answer(HTTPStatus.OK, _JSON, body)
        elif rest in figures:
            self._answer(HTTPStatus.OK, _SVG, run.figure(*figures[rest]), _SVG_POLICY)
        else:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page\n")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, _TEXT, text.encode())

    def _answer(
        self,
        status: HTTPStatus,
        kind: str,
        body: bytes,
        policy: str = _STRICT_POLICY,
        **headers: str,
    ) -> None:
        self.send_response(status)
        for name, value in {
            **_HEADERS,
            "Content-Security-Policy": policy,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is malformed or would change something."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code)
        self.close_connection = True
        self._answer(status, _TEXT, f"{status.phrase}\n".encode(), Allow="GET, HEAD")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the training."""
