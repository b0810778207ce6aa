"""Logging has one format and one configuration, made by the commands only."""

import logging
import subprocess
import sys

SCRIPT = """
import logging, sys
from kaitian_mpi.cli.logs import configure_logging
log = logging.getLogger("kaitian_mpi.train.checkpoint.files")
for level, rank in ("info", 0), ("info", 1), ("debug", 1), ("error", 0):
    configure_logging(level, "[3@node-b]", rank)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("step %d", 7)
    logging.getLogger("other").warning("not ours")
sys.stderr.close()
log.error("nobody reads this")
print("still here")
"""


def test_rank_0_logs_at_the_level_and_the_others_log_warnings_even_to_a_closed_terminal():
    info, warning = "[3@node-b] step 7", "[3@node-b] warning: step 7"
    debug, error = "[3@node-b] debug: step 7", "[3@node-b] error: step 7"
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stderr.splitlines() == [
        *(info, warning, error, "not ours"),
        *(warning, error, "not ours"),
        *(debug, info, warning, error, "not ours"),
        *(error, "not ours"),
    ]
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_importing_the_package_leaves_the_scripts_logging_alone(caplog):
    logger = logging.getLogger("kaitian_mpi")
    assert logger.handlers == []
    assert logger.propagate
    logging.getLogger("kaitian_mpi.train.checkpoint.files").warning(
        "seen by the script's own handlers"
    )
    assert caplog.messages == ["seen by the script's own handlers"]
