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
from kaitian_mpi.observe.report.page import make_page, reloading
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.style import drawing, to_image
from kaitian_mpi.observe.report.text import side_by_side

PROGRAM = "kaitian-report"
NAME = "report.html"
_WATCH_SEC = 10.0


def main() -> None:
    """Run the command."""
    try:
        options = make_parser().parse_args()
        if options.watch is not None and (options.text or options.images):
            raise UserError("--watch cannot be combined with --text or --images")
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
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_WATCH_SEC,
        metavar="SECONDS",
        help="while the run trains, write the page again at most this often "
        f"(default {_WATCH_SEC:g}); the open page reloads itself; ends with the run or at Ctrl-C",
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


def make_report(options: argparse.Namespace) -> None:
    """Write the page, once or until the runs end, and the images."""
    with drawing():
        pass  # without matplotlib, say so before reading long files
    runs = [read_run(path) for path in options.run_dirs]
    target = options.output or (runs[0].path / NAME if len(runs) == 1 else Path(NAME))
    if options.watch is not None:
        if target.exists() and not target.is_file():
            raise UserError(f"--watch: {target} is not a regular file; name one with -o")
        print(
            f"writing {target} again at most every {options.watch:g} s, until the run ends or you "
            "press Ctrl-C; open it in a browser: it reloads itself",
            flush=True,
        )
        _watch(options.run_dirs, target, options.watch)
        print(f"report in {target}")
        return
    _write(target, make_page(runs))
    for number, run in enumerate(runs, 1) if options.images else ():
        prefix = f"run{number}-" if len(runs) > 1 else ""
        for spec in FIGURES:
            if (figure := spec.draw(run)[0]) is not None:
                path = options.images / f"{prefix}{spec.name}.png"
                _write(path, to_image(figure, "png"), "--images")
    for run in runs:
        for reason in run.missing:
            print(f"{run.path}: {reason}", file=sys.stderr)
    # Not into the page itself, if that is /dev/stdout.
    stream = sys.stdout if target.is_file() else sys.stderr
    images = f", images in {options.images}" if options.images else ""
    print(f"report in {target}{images}", file=stream)


def _watch(paths: Sequence[Path], target: Path, every_sec: float) -> None:
    """Write the page whenever the runs' files have changed, until they end or Ctrl-C is pressed.

    The process has the lowest priority, beside a training that may need all cores.
    """
    os.nice(19)
    seen: set[tuple[Path, int]] = set()
    try:
        while True:
            found = set()
            for file in (file for folder in paths for file in folder.glob("*.json*")):
                with suppress(FileNotFoundError):  # it has just been replaced
                    found.add((file, file.stat().st_mtime_ns))
            if found != seen:
                runs, seen = [read_run(path) for path in paths], found
                if all(run.state != "unfinished" for run in runs):
                    break
                _write(target, reloading(make_page(runs), every_sec))
            time.sleep(every_sec)
    except KeyboardInterrupt:
        pass
    _write(target, make_page([read_run(path) for path in paths]))


def _write(path: Path, content: str | bytes, flag: str = "-o") -> None:
    """Write a file atomically; if it cannot be, name the flag for another place."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if flag == "--images":
        with suppress(OSError):  # writing the file tells why it cannot be
            path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, data, f"name another place with {flag}")


if __name__ == "__main__":
    main()
