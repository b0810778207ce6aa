"""Progress as plain lines, for log files and wherever there is no live view."""

from __future__ import annotations

from kaitian_mpi.observe.console import progress_line
from kaitian_mpi.observe.reading import Reading
from kaitian_mpi.observe.sink import MetricsSink


class PlainProgress(MetricsSink):
    """Prints a line for each reading."""

    def read(self, reading: Reading) -> None:
        """Print epoch, step, loss, samples per second, time left, and the script's own figures."""
        line = progress_line(
            epoch=reading.epoch + 1,
            epochs=reading.epochs,
            step=reading.step,
            steps=reading.total_steps,
            loss=reading.loss,
            rate=reading.samples_per_sec,
            left_sec=reading.seconds_left,
        )
        own = (f"{name} {value:.4g}" for name, value in reading.logged.items())
        print(" | ".join([line, *own]), flush=True)
