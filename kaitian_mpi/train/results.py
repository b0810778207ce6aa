"""Writes what a finished run leaves: its weights, its summary and the exported weights."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from kaitian_mpi.errors import AgreedError, StorageError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.folders import snapshots_name
from kaitian_mpi.observe.run_folder import MODEL_FILE
from kaitian_mpi.preflight.verdict import count_text
from kaitian_mpi.train.checkpoint.files import snapshot_files
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.state import weights
from kaitian_mpi.train.summary import NAME


class Results:
    """Brings a run's results to disk; without them it is not finished."""

    def __init__(self, run: Run, world: World, make_metadata: Callable[[], RunMetadata]) -> None:
        self._run = run
        self._world = world
        self._make_metadata = make_metadata

    def write(self) -> bool:
        """Write them; return whether all is written: if not, `run.fault` says why. Collective."""
        run = self._run
        world = self._world
        fault = ""
        with run.saving(world) as on_piece:
            model, why = run.state.collect_model(world, run.setup.path, on_piece)
            if world.rank == 0:
                try:
                    self._write(model, why)
                except StorageError as error:
                    fault = f"training is done, but {error}; {self._keep()}"
            del model  # which may be mapped files
        fault = gather_values(world.comm, fault)[0]
        if fault:
            run.fault = AgreedError(fault, StorageError.exit_code)
        else:
            run.checkpoints.close()
        return not fault

    def report(self) -> None:
        """Say that the run is finished, and where its results are. Not collective."""
        run = self._run
        epochs = run.state.progress.epoch
        step = run.state.progress.step
        run.summary = run.current_summary(finished=True)
        text = f"finished after {count_text(epochs, 'epoch')}, {count_text(step, 'step')}"
        ranks = run.summary.ranks or ()
        run.sinks.event("finish", step, text, ranks, validation=run.summary.validation)
        if run.setup.path is not None:
            print_rank_0(self._world, f"results in {run.setup.path}")
        if run.config.export:
            print_rank_0(self._world, f"exported the weights to {run.config.export}")

    def _write(self, model: dict[str, Any], why: OSError | None) -> None:
        """Write the weights, unless they are on disk already, and then the summary as finished.

        Existing files are kept. A checkpoint that did not fit is no error; `why` is the error by
        which the weights could not be collected.
        """
        run = self._run
        folder = run.setup.folder
        run.checkpoints.wait()  # one that is still being written needs space
        if not folder.has(MODEL_FILE):  # the disk may have been full only temporarily
            if why is None:
                folder.save_model(weights(model))
            else:
                folder.log_unsaved_model(why)
        folder.require(MODEL_FILE)
        if run.config.export:
            if why is not None:
                raise StorageError(f"{run.config.export} could not be written: {why.strerror}")
            from kaitian_mpi.train.weight_files import export_weights

            export_weights(run.config.export, run.state.model, model)
        folder.write(NAME, run.current_summary(finished=True).to_json())
        folder.require(NAME)

    def _keep(self) -> str:
        """Keep the state in memory, if there is room; return what the user should do."""
        run = self._run
        checkpoints = run.checkpoints
        step = run.state.progress.step
        again = f"run the same command with --run-dir {run.setup.path or 'FOLDER'} --resume auto"
        if checkpoints.on_disk is not None and checkpoints.on_disk.last_written == step:
            return f"step {step} is in its checkpoint: make room, and {again}"
        if not run.state.partition.is_whole:
            return f"make room, and {again} to continue from the last checkpoint"
        name = snapshots_name(run.config.snapshots, os.environ) or secrets.token_hex(8)
        writer = checkpoints.in_memory or BackgroundWriter(snapshot_files(name))
        checkpoints.write(writer, run.state, run.state.shared(), self._make_metadata())
        writer.wait()
        if writer.last_written == step:
            return (
                f"step {step} is kept in this host's memory: make room, and {again} --snapshots "
                f"{name}"
            )
        return f"memory is full, too: make room, and {again} to continue from the last checkpoint"
