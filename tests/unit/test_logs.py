"""Logging has one format and one configuration, made by the commands only."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import kaitian_mpi

ROOT = Path(kaitian_mpi.__file__).parent
SCRIPT = """
import logging, sys
from kaitian_mpi.cli.logs import configure_logging
configure_logging(sys.argv[1], "[3@node-b]", int(sys.argv[2]))
log = logging.getLogger("kaitian_mpi.train.checkpoint.files")
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)("step %d", 7)
logging.getLogger("other").warning("not ours")
if len(sys.argv) > 3:
    sys.stderr.close()
    log.warning("nobody reads this")
    print("still here")
"""


def logged(level, rank, *more):
    command = [sys.executable, "-c", SCRIPT, level, str(rank), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_rank_0_logs_at_the_level_and_the_others_log_warnings():
    info, warning = "[3@node-b] step 7", "[3@node-b] warning: step 7"
    debug, error = "[3@node-b] debug: step 7", "[3@node-b] error: step 7"
    assert logged("info", 0).stderr.splitlines() == [info, warning, error, "not ours"]
    assert logged("info", 1).stderr.splitlines() == [warning, error, "not ours"]
    assert logged("debug", 1).stderr.splitlines() == [debug, info, warning, error, "not ours"]
    assert logged("error", 0).stderr.splitlines() == [error, "not ours"]


def test_a_closed_terminal_does_not_end_the_process():
    assert logged("error", 0, "close").stdout == "still here\n"


def test_importing_the_package_leaves_the_scripts_logging_alone(caplog):
    logger = logging.getLogger("kaitian_mpi")
    assert logger.handlers == []
    assert logger.propagate
    logging.getLogger("kaitian_mpi.train.checkpoint.files").warning(
        "seen by the script's own handlers"
    )
    assert caplog.messages == ["seen by the script's own handlers"]


def test_only_cli_and_observe_print():
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print" or place in ("cli", "observe"), path
            if isinstance(node, ast.Attribute) and node.attr in ("basicConfig", "StreamHandler"):
                assert place == "cli", path
