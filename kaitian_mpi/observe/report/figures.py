"""All figures of a run, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaitian_mpi.observe.report import bar_figures, rank_figures, run_figures
from kaitian_mpi.observe.report.canvas import EMULATED, drawing
from kaitian_mpi.observe.report.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureSpec:
    """A figure that can be drawn of any run."""

    name: str
    """For files and ids."""
    title: str
    explanation: str
    """How to read it."""
    _draw: Callable[[Run], Figure | None]
    _describe: Callable[[Run], str]

    def draw(self, run: Run) -> Figure | None:
        """Return the figure; None if there is nothing to show yet.

        Raises:
            UserError: matplotlib is not installed.
        """
        with drawing():
            return self._draw(run)

    def alt(self, run: Run) -> str:
        """Return what the figure shows, in words and with its main numbers."""
        return self._describe(run) + (f" {EMULATED}." if run.emulated else "")


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "rate",
        "Training rate",
        "Numbers above the figure mark new plans, that is, new batch sizes, which are explained "
        "below “Batch size of each rank”.",
        run_figures.draw_rate,
        run_figures.describe_rate,
    ),
    FigureSpec(
        "batch-sizes",
        "Batch size of each rank",
        "How many samples of each step a rank computes. Each number above marks a new plan; the "
        "table below says why it was made.",
        rank_figures.draw_batch_sizes,
        rank_figures.describe_batch_sizes,
    ),
    FigureSpec(
        "utilization",
        "Utilization of each rank",
        "The share of each step in which a rank computes; the rest is waiting for other ranks, "
        "for data and for communication. The closer all ranks are to 100%, the better the batch "
        "sizes fit the devices.",
        rank_figures.draw_utilization,
        rank_figures.describe_utilization,
    ),
    FigureSpec(
        "step-phases",
        "What a step's time is spent on",
        "Means over the steps of a plan: of the first, the slowest and the last where there are "
        "more than three. “other” is the rest of the step's time.",
        bar_figures.draw_step_phases,
        bar_figures.describe_step_phases,
    ),
    FigureSpec(
        "learning",
        "Loss and held-out results",
        "The training loss is a mean over the steps since the last reading; held-out results are "
        "from data that is not trained on.",
        run_figures.draw_learning,
        run_figures.describe_learning,
    ),
    FigureSpec(
        "events",
        "What happened when",
        "The table below describes each event in words.",
        run_figures.draw_events,
        run_figures.describe_events,
    ),
)
