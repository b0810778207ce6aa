"""Takes the pictures of one run for the documentation: terminal, report, timeline.

    python docs/take_pictures.py docs/pictures

Starts a job of four ranks with emulated devices at a pseudo terminal. Rank 3 is killed after step
60, and rank 1 becomes three times slower at step 90. Some steps later the terminal is pictured, in
the colors that the job has sent; once the job has ended, the report, in a browser without a window,
and the timeline. The emulated devices sleep for most of a step, for four ranks
share the cores. Needs Chromium; takes two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS, SHOWN = 100, 30, 19
COMMAND = (
    "mpirun --with-ft ulfm --timeout 300 -np 4 kaitian-train --model cnn --epochs 14 --keep-all "
    "--emulate-kinds gpu,gpu,mlu,mlu --emulate-slowdown 0:2,1:2,2:4,3:4,1:6@90 --run-dir mixed "
    "--global-batch-size 128 --benchmark-seconds 6 --log-interval 0.7 --progress live "
    "--timeline --timeline-every 1"
)
KILL_AT, PICTURE_AT = 60, 105
TRIES = 5
STEP = 8  # before the first gathering of events, so that the lost rank's are in the file
FIGURES = ("batch-sizes", "utilization", "step-phases", "events")
ERASED = re.compile(r"\r\x1b\[2K((?:\x1b\[1A\x1b\[2K)*)")  # the last frame
CURSOR = re.compile(r"\x1b\[\?25[hl]")
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # would be loaded from elsewhere


@dataclass
class Seen:
    """What a terminal showed."""

    text: str = ""
    """All that was written to it."""
    pictured: str = ""
    """What had been written when the terminal was pictured."""


def main() -> None:
    """Run the job, and take its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="for the pictures")
    parser.add_argument("--keep", type=Path, help="copy the run folder to this one")
    options = parser.parse_args()
    pictures = options.folder.resolve()
    with tempfile.TemporaryDirectory() as folder:
        seen = watch(Path(folder)).pictured
        run = Path(folder) / "mixed"
        draw([row for line in screen_of(seen) for row in wrap(line)], pictures / "terminal.svg")
        picture_report(run, pictures)
        picture_timeline(run, pictures)
        if options.keep:
            shutil.copytree(run, options.keep)


def watch(folder: Path) -> Seen:
    """Run the job to its end."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    job = subprocess.Popen(
        ["setsid", "--ctty", *COMMAND.split()],
        cwd=folder,
        env=env,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
    )
    os.close(slave)
    seen, killed = Seen(), False
    try:
        while data := os.read(master, 65536):
            seen.text += data.decode(errors="replace")
            step = int(["0", *re.findall(r"step (\d+)/", seen.text)][-1])
            if step >= KILL_AT and not killed:
                killed = True
                os.kill(rank_3_of(job.pid), signal.SIGKILL)
            *_, before, last = [0, 0, *(found.start() for found in ERASED.finditer(seen.text))]
            frame = seen.text[before:last]  # the last one may be incomplete
            if step >= PICTURE_AT and "slow: " in frame and not seen.pictured:
                seen.pictured = seen.text[:last]
    except OSError:  # the job has ended
        pass
    finally:
        job.send_signal(signal.SIGTERM)
        os.close(master)
    if job.wait() or not seen.pictured:
        print(seen.text, file=sys.stderr)
        raise SystemExit("the job failed, or ended too early")
    return seen


def browse(address: str, width: int, height: int, picture: Path) -> None:
    """Picture the top of a page, of so many pixels.

    A browser under load may write its picture with blocks that are not painted yet, so two pictures
    of unlike windows have to agree on what both show.
    """
    for _ in range(TRIES):
        one = pictured(address, width, height, picture)
        other = pictured(address, width, height + 300, picture).crop((0, 0, width, height))
        if ImageChops.difference(one, other).getbbox() is None:
            one.save(picture)
            make_small(picture)
            return
    raise SystemExit(f"{picture.name}: {TRIES} pictures of the page have blocks without content")


def pictured(address: str, width: int, height: int, file: Path) -> Image.Image:
    """Return a picture of a page in a window of this size."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--hide-scrollbars", "--virtual-time-budget=5000"),
                *(f"--window-size={width},{height}", f"--user-data-dir={profile}"),
                *(f"--screenshot={file}", address),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    with Image.open(file) as image:
        return image.convert("RGB")


def picture_report(run: Path, pictures: Path) -> None:
    """Picture the top of the report, and take some of its figures."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        command = ["kaitian-report", run, "-o", page, "--images", folder]
        subprocess.run(command, check=True)
        browse(page.as_uri(), 1200, 1640, pictures / "report.png")
        for name in FIGURES:
            picture = pictures / f"report-{name}.png"
            shutil.copyfile(Path(folder) / f"{name}.png", picture)
            make_small(picture)


def picture_timeline(run: Path, pictures: Path) -> None:
    """Draw a step, and the steps around the loss."""
    script = Path(__file__).with_name("draw_timeline.py")
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    lost = next(event["step"] for event in events if event["kind"] == "loss")
    for steps, name in ((f"{STEP}", "timeline"), (f"{lost - 1}-{lost + 3}", "timeline-loss")):
        picture = pictures / f"{name}.png"
        subprocess.run([sys.executable, script, run / "timeline.json", steps, picture], check=True)
        make_small(picture)


def make_small(picture: Path) -> None:
    """Write a picture with few colors and at most 1200 pixels wide."""
    image = Image.open(picture).convert("RGB")
    if image.width > 1200:
        size = 1200, round(image.height * 1200 / image.width)
        image = image.resize(size, Image.Resampling.LANCZOS)
    image.quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


def rank_3_of(launcher: int) -> int:
    """Return the process that is rank 3 of a job."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environ = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and b"OMPI_COMM_WORLD_RANK=3" in environ:
            return int(path.name)
    raise SystemExit("there is no rank 3")


def wrap(line: str) -> list[str]:
    """Return a line as the terminal wraps it; one with colors is a frame's, and fits."""
    if "\x1b" in line:
        return [line]
    return [line[at : at + COLUMNS] for at in range(0, max(1, len(line)), COLUMNS)]


def screen_of(written: str) -> list[str]:
    """Return the lines that are left on a terminal on which frames replace one another."""
    parts = ERASED.split(CURSOR.sub("", written))
    lines = parts[0].split("\r\n")
    for ups, text in zip(parts[1::2], parts[2::2], strict=True):
        lines[-ups.count("A") - 1 :] = text.split("\r\n")
    return lines


def draw(lines: list[str], path: Path) -> None:
    """Write the picture of the last lines."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for line in lines[-SHOWN:]:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop", highlight=False)
    svg = console.export_svg(title="mpirun -np 4 kaitian-train …", unique_id="terminal")
    path.write_text(FONTS.sub("", svg).replace("Fira Code, monospace", "monospace"))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
