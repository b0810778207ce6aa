"""A real browser, without a window and without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = "chromium", "google-chrome"
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def find_browser() -> str:
    """Return a browser's command; skips the test where there is none, unless one is required."""
    for name in NAMES:
        if shutil.which(name):
            return name
    if os.environ.get("KAITIAN_TEST_BROWSER") == "required":
        pytest.fail("found no browser, needed chromium; .ci/run installs it")
    pytest.skip("needs chromium; see .ci/run")


def browse(url: str, folder: Path, *options: str, limit_sec: float = 300) -> str:
    """Return what a browser writes, such as the page's elements with Chromium's --dump-dom.

    It keeps what it needs in the folder.
    """
    command = [find_browser(), "--headless=new", "--no-sandbox", "--disable-gpu", NO_NETWORK]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={folder}", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_sec)
    assert done.returncode == 0, done.stderr
    return done.stdout
