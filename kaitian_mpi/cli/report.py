"""`kaitian-report`: shows what happened in runs, as an HTML page and images."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import replacing
from kaitian_mpi.observe.report.bar_figures import draw_comparison
from kaitian_mpi.observe.report.canvas import drawing
from kaitian_mpi.observe.report.figures import FIGURES
from kaitian_mpi.observe.report.page import make_page
from kaitian_mpi.observe.report.run import Run
from kaitian_mpi.observe.report.run_files import read_run
from kaitian_mpi.observe.report.svg import to_image
from kaitian_mpi.observe.report.text import side_by_side

PROGRAM = "kaitian-report"
NAME = "report.html"
_FORMATS = ("png", "svg")


def main() -> None:
    """Run the command."""
    try:
        options = make_parser().parse_args()
        formats = read_formats(options.format)
        if options.text:
            show_text([read_run(path) for path in options.run_dirs])
            return
        with drawing():
            pass  # without matplotlib, say so before reading long files
        runs = [read_run(path) for path in options.run_dirs]
        target = options.output or (runs[0].path / NAME if len(runs) == 1 else Path(NAME))
        check_writable(target)
        write(target, make_page(runs).encode("utf-8", "replace"), "-o")
        images = write_images(options.images, runs, formats) if options.images else 0
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    for run in runs:
        for reason in run.missing:
            print(f"{run.path}: {reason}", file=sys.stderr)
    # Not into the page itself, where that is /dev/stdout.
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
        epilog=f"example: {PROGRAM} runs/cnn-20261122-161600",
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


def read_formats(text: str) -> list[str]:
    """Parse `png,svg`.

    Raises:
        UserError: a format is unknown.
    """
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in formats:
        if name not in _FORMATS:
            raise UserError(f"--format: found {name!r}, needed png, svg or png,svg")
    return formats


def write_images(folder: Path, runs: Sequence[Run], formats: Sequence[str]) -> int:
    """Write each figure of each run to a folder; return the number of files.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--images {folder}: {error.strerror}; name another folder") from error
    count = 0
    for name, figure in _figures(runs):
        for kind in formats if figure is not None else ():
            write(folder / f"{name}.{kind}", to_image(figure, kind), "--images")
            count += 1
    return count


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Yield the names and figures of all runs; None for a figure without content."""
    if len(runs) > 1:
        with drawing():
            figure = draw_comparison(runs)
        yield "comparison", figure
    for number, run in enumerate(runs, 1):
        prefix = f"run{number}-" if len(runs) > 1 else ""
        for spec in FIGURES:
            yield f"{prefix}{spec.name}", spec.draw(run)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before much is drawn.

    Raises:
        UserError: it cannot.
    """
    folder = path.resolve().parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "no permission"
    else:
        return
    raise UserError(f"{path}: cannot be written ({reason}); name another file with -o")


def write(path: Path, content: bytes, flag: str) -> None:
    """Write a file atomically.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # such as /dev/stdout
            return
        with replacing(path.resolve(), shared=True) as file:
            file.write(content)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); name another place with {flag}"
        ) from error


if __name__ == "__main__":
    main()
