"""The rows of the table that benchmarks/gpu.py prints: tests, and measurements with a limit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Not part of the standard library's safe parsers, but the file is our own.
from xml.etree import ElementTree

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from shared import stand_in
from shared.launch import ENVIRONMENT, PYTHON

from kaitian_mpi.devices import known_kinds
from kaitian_mpi.preflight.probe import loaded_drivers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WIDTH = 110
LIMIT_SEC = 3600


@dataclass
class Row:
    """A line of the table."""

    name: str
    figure: str
    limit: str
    verdict: str
    """pass, FAIL, skipped, or ran: on a stand-in, where limits say nothing."""


class FailedError(Exception):
    """A command failed; says how."""


class Suite:
    """Everything that is run on one machine.

    Args:
        folder: for what the runs write.
        data_dir: the folder of CIFAR-10's official files, or empty.
        quick: few steps.
    """

    def __init__(self, folder: Path, data_dir: str, *, quick: bool) -> None:
        self.folder, self.data_dir, self.quick = folder, data_dir, quick
        self.kind, self.count = stand_in.KIND, stand_in.COUNT
        self.emulated = self.kind == stand_in.STAND_IN

    def run(self) -> list[Row]:
        """Run the tests and the measurements; a line of progress for each goes to stderr."""
        rows = self._tests()
        for name, measure in self._measurements():
            print(f"gpu.py: {name} ...", file=sys.stderr, flush=True)
            try:
                rows.append(measure(name))
            except FailedError as error:
                rows.append(Row(name, str(error)[:300], "", "FAIL"))
        return rows

    def _measurements(self) -> list[tuple[str, Callable[[str], Row]]]:
        return [
            ("relay's copies / page-locked copies", self._copies),
            ("64 MB all_reduce between kinds / its slowest stage", self._relay),
            ("one rank under data_parallel / stock DDP, step time", self._alone),
            ("accelerator and CPU / accelerator alone, samples/s", self._together),
            ("MobileNetV2, held-out accuracy", self._accuracy),
        ]

    def _tests(self) -> list[Row]:
        print("gpu.py: tests/gpu ...", file=sys.stderr, flush=True)
        report = self.folder / "tests.xml"
        code, text = self._execute(
            [PYTHON, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={report}"], cwd=ROOT
        )
        if not report.exists():
            return [Row("tests/gpu", f"exit code {code}: {text[-200:]}", "", "FAIL")]
        rows = []
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            outcome = {child.tag: child for child in case}
            skipped = outcome.get("skipped")
            failed = "failure" in outcome or "error" in outcome
            verdict = "FAIL" if failed else "pass" if skipped is None else "skipped"
            why = "" if skipped is None else str(skipped.get("message", ""))
            rows.append(Row(str(case.get("name")), why, "", verdict))
        return rows

    def _copies(self, name: str) -> Row:
        figures = self._json(1, "copies.py", launcher=False)
        figure = (
            f"{figures['ratio']:.2f} ({figures['relay_both_mb_per_sec']:,.0f} of "
            f"{figures['plain_both_mb_per_sec']:,.0f} MB/s, both ways at once)"
        )
        return self._judged(name, figure, "at least 0.80", figures["ratio"] >= 0.8)

    def _relay(self, name: str) -> Row:
        figures = self._json(2, "relay_stages.py")
        figure = f"{figures['ratio']:.2f} ({1e3 * figures['whole_sec']:.0f} ms)"
        return self._judged(name, figure, "at most 1.25", figures["ratio"] <= 1.25)

    def _alone(self, name: str) -> Row:
        size = ("--batch", "8", "--pairs", "8", "--model", "cnn") if self.quick else ()
        figures = self._json(1, "alone.py", *size)
        low, high = figures["quartiles"]
        figure = f"{figures['ratio']:.3f} (quartiles {low:.3f} to {high:.3f})"
        return self._judged(name, figure, "at most 1.03", figures["ratio"] <= 1.03)

    def _together(self, name: str) -> Row:
        """The throughput of the same training with and without a CPU rank; excluded if slower."""
        flags = ["--max-steps", "30" if self.quick else "300", "--check-every", "0"]
        rates = [
            self._train(f"with-{cpus}-cpus", cpus, flags)["samples_per_sec"] for cpus in (0, 1)
        ]
        figure = f"{rates[1] / rates[0]:.3f} ({rates[1]:,.0f} and {rates[0]:,.0f})"
        # Two runs on a machine that does nothing else differ by less than this.
        return self._judged(name, figure, "at least 0.99", rates[1] >= 0.99 * rates[0])

    def _accuracy(self, name: str) -> Row:
        if self.data_dir:
            flags = ["--dataset", "cifar10", "--data-dir", os.path.abspath(self.data_dir)]
            flags += ["--epochs", "30", "--precision", "bf16"]
            least, data = 0.90, "CIFAR-10, 30 epochs"
        else:
            least, data = 0.97, "handwritten digits, 10 epochs"
            flags = ["--dataset", "digits"]
        if self.quick:
            flags, data = [*flags, "--max-steps", "10"], "cnn, 10 steps"
        figures = self._train("accuracy", 1, flags)
        figure = (
            f"{figures['val_accuracy']:.4f} ({data}, {figures['samples_per_sec']:,.0f} samples/s)"
        )
        return self._judged(name, figure, f"at least {least}", figures["val_accuracy"] >= least)

    def _judged(self, name: str, figure: str, limit: str, is_kept: bool) -> Row:
        if self.emulated or self.quick:
            return Row(name, figure, limit, "ran")
        return Row(name, figure, limit, "pass" if is_kept else "FAIL")

    def _train(self, run_dir: str, cpus: int, flags: list[str]) -> dict[str, Any]:
        """Train MobileNetV2, or in quick runs a small network; return the summary."""
        model = ["--model", "cnn" if self.quick else "mobilenetv2"]
        command = ["mpirun", "-np", str(1 + cpus), "kaitian-train", *model, *flags]
        command += [*stand_in.devices(1, cpus), "--run-dir", str(self.folder / run_dir)]
        self._checked(command)
        content: dict[str, Any] = json.loads((self.folder / run_dir / "summary.json").read_text())
        return content

    def _json(self, ranks: int, script: str, *flags: str, launcher: bool = True) -> dict[str, Any]:
        """Run a script of this folder; return the JSON that it prints."""
        start = ["mpirun", "-np", str(ranks)] if launcher else []
        words = [PYTHON, str(HERE / script), *stand_in.devices(1, ranks - 1), *flags]
        text = self._checked([*start, *words])
        figures: dict[str, Any] = json.loads(text[text.index("{") :].splitlines()[0])
        return figures

    def _checked(self, command: list[str]) -> str:
        code, text = self._execute(command, cwd=self.folder, **stand_in.environment())
        if code:
            said = " ".join(text.replace("-" * 8, "").split())
            raise FailedError(f"exit code {code}: ...{said[-250:]}")
        return text

    def _execute(self, command: list[str], *, cwd: Path, **variables: str) -> tuple[int, str]:
        """Run a command; return its exit code and its output, of which stdout comes first."""
        environ = {**ENVIRONMENT, "KAITIAN_GPU_KIND": self.kind, **variables}
        try:
            ended = subprocess.run(
                command,
                cwd=cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_SEC,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FailedError(f"still running after {LIMIT_SEC} s") from None
        return ended.returncode, ended.stdout + ended.stderr


def print_table(suite: Suite, rows: list[Row], seconds: float) -> None:
    """Print what ran on what, and the rows."""
    named = loaded_drivers()
    lines = [
        time.strftime("%Y-%m-%d %H:%M"),
        f"{suite.count} x {suite.kind}" + (": EMULATED, NOT A GPU" if suite.emulated else ""),
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores",
        ", ".join(f"{name} {version}" for name, version in named.items()) or "no driver",
        *(["quick: too few steps for the limits"] if suite.quick else []),
        f"{seconds / 60:.1f} minutes",
    ]
    if not suite.emulated:
        lines[1] += f", {known_kinds().devices[suite.kind].name(0)}"
    table = Table(title="\n".join(lines), title_justify="left", title_style="", box=box.ASCII2)
    for column in ("check", "found", "limit", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, row.figure, row.limit, row.verdict)
    Console(width=WIDTH, force_terminal=False, no_color=True, markup=False).print(table)
