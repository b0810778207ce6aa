"""The results of a run: written at its end, and loaded by a job that finds it finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.run_folder import NoFolder, RunFolder
from kaitian_mpi.train.checkpoint.metadata import RunMetadata
from kaitian_mpi.train.checkpoint.policy import Checkpointing
from kaitian_mpi.train.checkpoint.resume import restore
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.resumption import EarlierJob
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.summary import NAME, Summary
from kaitian_mpi.train.weight_files import export_weights

_MODEL = "checkpoints/model.pt"


def write_results(
    folder: RunFolder,
    checkpoints: Checkpointing,
    state: State,
    metadata: Callable[[], RunMetadata],
    summary: Summary,
    export: str = "",
) -> None:
    """Write the weights, unless they are on disk already, and then the summary as finished.

    Called on the rank that writes the files. Existing files are kept; if the disk is full, the
    state is kept in this host's memory. A checkpoint that did not fit is not an error.

    Raises:
        StorageError: the disk is full, or cannot be written for another reason.
    """
    checkpoints.wait()  # one that is still being written needs space
    try:
        if not folder.has(_MODEL):  # the disk may have been full only temporarily
            folder.save_model(state.weights())
        folder.require(_MODEL)
        if export:
            export_weights(export, state.model)
        folder.write(NAME, replace(summary, finished=True).to_json())
        folder.require(NAME)
    except StorageError as error:
        kept = _keep(folder, checkpoints, state, metadata)
        raise StorageError(f"training is done, but {error}; {kept}") from error


def _keep(
    folder: RunFolder,
    checkpoints: Checkpointing,
    state: State,
    metadata: Callable[[], RunMetadata],
) -> str:
    """Keep the state in memory, if there is room; return what the user should do."""
    step = state.progress.step
    run_dir = "FOLDER" if isinstance(folder, NoFolder) else folder.path
    again = f"make room, and run the same command with --run-dir {run_dir} --resume auto"
    if checkpoints.is_on_disk(step):
        return f"step {step} is in its checkpoint: {again}"
    name = checkpoints.keep_in_memory(state, metadata())
    if name:
        return f"step {step} is kept in this host's memory: {again} --snapshots {name}"
    return f"there is no room in /dev/shm either: {again}, from the last checkpoint"


def load_finished(config: TrainingConfig, setup: Setup, earlier: EarlierJob, world: World) -> State:
    """Give every rank's model the weights of a finished run; export them if asked to. Collective.

    Raises:
        AgreedError: they cannot be exported.
    """
    computation = Computation(world.device, "fp32", "contiguous")
    state = State(setup.task, computation, earlier.found.progress["step"])
    restore(world, state, earlier.found, config.seed)
    with agree_on_errors(world.comm):
        if world.rank == 0 and config.export:
            try:
                export_weights(config.export, setup.task.model)
            except StorageError as error:
                raise StorageError(f"{error}; make room, and run the same command again") from error
    if config.export:
        print_rank_0(world, f"exported the weights to {config.export}")
    setup.folder.confirm(NAME)  # for kaitian-supervise
    return state
