"""`kaitian-report`: shows what happened in runs, as an HTML page and images."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.report.canvas import drawing
from kaitian_mpi.observe.report.output import check_writable, watch, write, write_images
from kaitian_mpi.observe.report.page import make_page
from kaitian_mpi.observe.report.run import Run
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.text import side_by_side

PROGRAM = "kaitian-report"
NAME = "report.html"
_FORMATS = ("png", "svg")
_WATCH_SEC = 10.0


def main() -> None:
    """Run the command."""
    try:
        options = make_parser().parse_args()
        formats = read_formats(options.format)
        if options.watch is not None and (options.text or options.images):
            raise UserError("--watch cannot be combined with --text or --images")
        if options.text:
            show_text([read_run(path) for path in options.run_dirs])
        else:
            make_report(options, formats)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def make_report(options: argparse.Namespace, formats: Sequence[str]) -> None:
    """Write the page, once or until the runs end, and the images.

    Args:
        options: the command's flags.
        formats: of the images.

    Raises:
        UserError: a folder cannot be read, a file cannot be written, or matplotlib is missing.
    """
    with drawing():
        pass  # without matplotlib, say so before reading long files
    runs = [read_run(path) for path in options.run_dirs]
    target = options.output or (runs[0].path / NAME if len(runs) == 1 else Path(NAME))
    check_writable(target)
    if options.watch is not None:
        if target.exists() and not target.is_file():
            raise UserError(f"--watch: {target} is not a regular file; name one with -o")
        print(
            f"writing {target} again at most every {options.watch:g} s, until the run ends or you "
            "press Ctrl-C; open it in a browser: it reloads itself",
            flush=True,
        )
        watch(options.run_dirs, target, options.watch)
        print(f"report in {target}")
        return
    write(target, make_page(runs), "-o")
    images = write_images(options.images, runs, formats) if options.images else 0
    for run in runs:
        for reason in run.missing:
            print(f"{run.path}: {reason}", file=sys.stderr)
    # Not into the page itself, if that is /dev/stdout.
    stream = sys.stdout if target.is_file() else sys.stderr
    done = f"report in {target}" + (f", {images} images in {options.images}" if images else "")
    print(done, file=stream)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Show what happened in a run, or in several side by side: one HTML file that "
        "opens without a network. Works even while a run trains, and after a crash. Needs "
        'neither MPI nor the devices, but matplotlib: pip install "kaitian-mpi[report]".',
        epilog=f"example: {PROGRAM} runs/cnn-20261122-161600 --watch",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; default RUN_DIR/report.html, or report.html here for several runs",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_WATCH_SEC,
        metavar="SECONDS",
        help="while the run trains, write the page again at most this often "
        f"(default {_WATCH_SEC:g}); the open page reloads itself; ends with the run or at Ctrl-C",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="print rates, results, batch sizes and how busy each rank was, and write nothing; "
        "needs no matplotlib",
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="also write each figure as a file to this folder"
    )
    parser.add_argument(
        "--format",
        default="png",
        metavar="LIST",
        help="format of these files: png, svg or png,svg (default png)",
    )
    return parser


def _seconds(text: str) -> float:
    """Parse the argument of `--watch`."""
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; give the run folder before --watch"
        ) from error
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 86400 seconds")
    return seconds


def read_formats(text: str) -> list[str]:
    """Parse `png,svg`.

    Raises:
        UserError: a format is unknown.
    """
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in formats:
        if name not in _FORMATS:
            raise UserError(f"--format {name}: unknown format; give png, svg or png,svg")
    return formats


def show_text(runs: Sequence[Run]) -> None:
    """Print what a terminal shows of runs; names that its encoding lacks are replaced."""
    encoding = sys.stdout.encoding or "ascii"
    text = side_by_side(runs, unicode=_encodes("█▏", encoding))
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeError:
        return False
    return True


if __name__ == "__main__":
    main()
