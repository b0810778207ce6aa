"""How long a probe waits for hosts that do not respond."""

import time

import pytest

from kaitian_mpi.runtime.hosts import Host
from kaitian_mpi.supervise.probe import lost_hosts

AGENT = """#!/bin/sh
case $1 in dead) exec sleep 60 ;; slow) sleep 0.7 ;; slower) sleep 30 ;; refusing) exit 255 ;; esac
"""


@pytest.fixture
def agent(tmp_path):
    """A fake ssh; the names of its hosts say how they respond."""
    path = tmp_path / "agent"
    path.write_text(AGENT)
    path.chmod(0o755)
    return [str(path)]


@pytest.mark.parametrize(
    ("names", "seconds", "lost", "least", "most"),
    [
        ("live live2 refusing", 20, {"refusing"}, 0, 18),
        ("live dead", 20, {"dead"}, 2, 18),
        ("live slow dead", 20, {"dead"}, 2.8, 18),
        ("live slower dead", 2, {"slower", "dead"}, 2, 18),
        ("dead refusing", 3, {"dead", "refusing"}, 3, 18),
    ],
)
def test_the_probe_timeout_follows_the_other_hosts_response_times(
    agent, names, seconds, lost, least, most
):
    began = time.monotonic()
    assert lost_hosts(agent, [Host(name=name) for name in names.split()], seconds) == lost
    assert least <= time.monotonic() - began < most
