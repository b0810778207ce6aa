"""Going on from what an earlier job has left."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kaitian_mpi.config import TrainConfig, flag_name
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.agreement import faults_agreed
from kaitian_mpi.mpi.exchange import broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.checkpoint import snapshot_files
from kaitian_mpi.training.checkpoint_files import Checkpoint, CheckpointFiles
from kaitian_mpi.training.folder_lock import wait_for_writer
from kaitian_mpi.training.memory_of_run import Memory
from kaitian_mpi.training.report import say, say_here
from kaitian_mpi.training.state import TrainingState, from_bytes, to_bytes

_MUST_STAY = ("model", "dataset", "val_split", "seed")
_MAY_CHANGE_UNSAID = ("run_dir", "resume", "snapshots", "emulate_kinds", "emulate_slowdown")


@dataclass
class Found:
    """What an earlier job has left."""

    memory: Memory | None = None
    """The same on every rank; None where nothing was found, or asked for."""
    content: dict[str, Any] | None = None
    """The checkpoint, on the one rank that has read it."""
    name: str = ""
    """Where it was."""


def find_checkpoint(
    config: TrainConfig, world: World, run_folder: Path, always: bool = False
) -> Found:
    """Find the newest checkpoint, on disk or in a host's memory. Collective.

    Args:
        config: `--resume` and `--snapshots`.
        world: the ranks.
        run_folder: as world rank 0 sees it.
        always: look in the run folder even if `--resume` does not ask for it.

    Raises:
        AgreedError: the file that `--resume` names is no good checkpoint, or a newer version of
            this package has written it.
    """
    own = None
    with faults_agreed(world.comm):
        if world.rank == 0 and (config.resume or always):
            own = _on_disk(config, run_folder)
        in_memory = _in_memory(config, world)
    if in_memory is not None and (own is None or in_memory.step > own.step):
        own = in_memory
    told = gather_values(
        world.comm, own and {"step": own.step, "name": own.path.name, "memory": own.state["memory"]}
    )
    steps = [-1 if one is None else one["step"] for one in told]
    source = steps.index(max(steps))
    if told[source] is None:
        if config.resume:
            say(world, f"found no checkpoint in {run_folder}: the run begins")
        return Found()
    memory = Memory.from_json(told[source]["memory"])
    name = f"{told[source]['name']} of {world.infos[source].host}"
    return Found(memory, own.state if own is not None and world.rank == source else None, name)


def check_resumable(config: TrainConfig, world: World, memory: Memory) -> None:
    """Check a checkpoint's settings against those of now, and say what has changed.

    Raises:
        AgreedError: they are of different runs.
    """
    for name, now in asdict(config).items():
        then = memory.config.get(name, now)
        if then == now or name in _MAY_CHANGE_UNSAID:
            continue
        if name in _MUST_STAY:
            raise AgreedError(
                f"{flag_name(name)}: found {now!r}, needed {then!r}, with which the checkpoint was "
                "made; give the same, or another --run-dir"
            )
        say(world, f"{flag_name(name)} was {then!r} before, and is {now!r} from here on")


def load_content(
    state: TrainingState, content: dict[str, Any] | None, shares: list[int] | None
) -> dict[str, Any] | None:
    """Load what this rank has read, if it has read anything; return it. Not collective.

    Args:
        state: of this rank, as it was made.
        content: of the checkpoint.
        shares: the batch sizes of the ranks that saved it, where other ranks go on: then each gets
            the statistics of all their samples. None where the same ranks do.

    Raises:
        UserError: it is of another model.
    """
    if content is not None:
        state.load_shared(content)
        if shares is not None and len(content["own"]) == len(shares):
            state.load_mixture(content["own"], shares)
    return content


def restore(
    world: World,
    state: TrainingState,
    content: dict[str, Any] | None,
    is_same_crew: bool,
    seed: int,
) -> None:
    """Give every rank the state that one of them has loaded. Collective.

    Args:
        world: the ranks that train.
        state: of this rank.
        content: of the checkpoint, on the rank that has loaded it.
        is_same_crew: whether the ranks are those that saved it, in the same places.
        seed: of the run.
    """
    source = state.even_out(world)
    own = [] if content is None or not is_same_crew else content["own"]
    told = broadcast_bytes(
        world.comm, to_bytes({"own": own}) if world.rank == source else None, source
    )
    own = from_bytes(told)["own"]
    if len(own) == world.size:
        state.load_own(own[world.rank])
    else:
        torch.manual_seed((seed + state.progress.step) * world.size + world.rank)


def _on_disk(config: TrainConfig, run_folder: Path) -> Checkpoint | None:
    if config.resume in ("", "auto"):
        files = CheckpointFiles(run_folder / "checkpoints", config.keep_checkpoints)
        wait_for_writer(files.folder, say_here)  # the job before may just have been ended
        return files.newest_good(say_here)
    path = Path(config.resume)
    if not path.is_file():
        raise UserError(f"--resume: found no file {path}, needed auto or a checkpoint's .pt file")
    return CheckpointFiles.load(path)


def _in_memory(config: TrainConfig, world: World) -> Checkpoint | None:
    """Return this host's snapshot, on the host's first rank."""
    hosts = [info.host for info in world.infos]
    snapshots = snapshot_files(config)
    if snapshots is None or hosts.index(world.info.host) != world.rank:
        return None
    return snapshots.newest_good(say_here)
