"""`kaitian-report`: shows what happened in runs, as an HTML page and images."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.cli.logs import print_text
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import write_output
from kaitian_mpi.observe.report.figures import FIGURES
from kaitian_mpi.observe.report.page import make_page
from kaitian_mpi.observe.report.run import RecordedRun
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.style import drawing, to_image
from kaitian_mpi.observe.report.text import side_by_side

PROGRAM = "kaitian-report"
NAME = "report.html"
WATCH_SEC = 10


def main() -> None:
    """Run the command."""
    try:
        options = make_parser().parse_args()
        if options.text:
            # Names that the terminal's encoding lacks are replaced.
            encoding = sys.stdout.encoding or "ascii"
            text = side_by_side([read_run(path) for path in options.run_dirs])
            print_text(text.encode(encoding, "replace").decode(encoding))
        else:
            make_report(options)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def make_parser() -> OneLineParser:
    """Return the command's parser."""
    parser = OneLineParser(
        PROGRAM,
        "Show what happened in a run, or in several side by side: one HTML file that opens without "
        "a network. Works even while a run trains, and after a crash. Needs neither MPI nor the "
        'devices, but matplotlib: pip install "kaitian-mpi[report]".',
        f"{PROGRAM} runs/cnn-20261122-161600 --watch",
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page to this file; default RUN_DIR/report.html, or ./report.html for "
        "several runs",
    )
    parser.add(
        "--watch",
        f"write the page again every {WATCH_SEC} s, until the run ends or Ctrl-C; the open page "
        "reloads itself",
    )
    parser.add(
        "--text",
        "print rates, results, batch sizes and how busy each rank was, and write nothing; "
        "needs no matplotlib",
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="also write each figure as a PNG to this folder"
    )
    return parser


def make_report(options: argparse.Namespace) -> None:
    """Write the page and the images."""
    with drawing():
        pass  # without matplotlib, say so before reading long files
    runs = [read_run(path) for path in options.run_dirs]
    target = options.output or (runs[0].path / NAME if len(runs) == 1 else Path(NAME))
    if options.watch:
        runs = _watch(runs, target)
    _write_page(target, make_page(runs))
    if options.images:
        _write_images(runs, options.images)
    for run in runs:
        for reason in run.missing:
            print(f"{run.path}: {reason}", file=sys.stderr)
    # Not into the page itself, if that is /dev/stdout.
    stream = sys.stdout if target.is_file() else sys.stderr
    images = f", images in {options.images}" if options.images else ""
    print(f"report in {target}{images}", file=stream)


def _watch(runs: Sequence[RecordedRun], target: Path) -> list[RecordedRun]:
    """Write the page again and again, until the runs end or Ctrl-C; return what they are then."""
    os.nice(19)  # beside a training that may need all cores
    print(f"writing {target} every {WATCH_SEC} s, until the run ends or Ctrl-C", flush=True)
    with suppress(KeyboardInterrupt):
        while any(run.state == "unfinished" for run in runs):
            _write_page(target, make_page(runs, reload_sec=WATCH_SEC))
            time.sleep(WATCH_SEC)
            runs = [read_run(run.path) for run in runs]
    return [read_run(run.path) for run in runs]


def _write_page(target: Path, page: str) -> None:
    write_output(target, page.encode("utf-8", "replace"), "name another place with -o")


def _write_images(runs: Sequence[RecordedRun], folder: Path) -> None:
    with suppress(OSError):  # writing the first file tells why it cannot be
        folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, 1):
        prefix = f"run{number}-" if len(runs) > 1 else ""
        for spec in FIGURES:
            if (figure := spec.draw(run)[0]) is not None:
                path = folder / f"{prefix}{spec.name}.png"
                write_output(path, to_image(figure, "png"), "name another place with --images")


if __name__ == "__main__":
    main()
