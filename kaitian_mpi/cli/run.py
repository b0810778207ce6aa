"""`kaitian-run script.py args…`: torchrun's counterpart under mpirun, for mixed devices."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.cli.flags import start_mpirun_if_requested
from kaitian_mpi.cli.logs import configure_logging
from kaitian_mpi.cli.run_flags import PROGRAM, make_parser, own_flags
from kaitian_mpi.cli.train import hide_unused_devices
from kaitian_mpi.devices.choice import LIBRARY_VARIABLE, SHARE_VARIABLE
from kaitian_mpi.devices.emulation import KINDS_VARIABLE, SLOWDOWN_VARIABLE
from kaitian_mpi.devices.plugin import import_torch
from kaitian_mpi.distributed.interfaces import initialize_mpi_on
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import GROUP_VARIABLE
from kaitian_mpi.observe.files import json_bytes, replacing
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.abort import abort_on_error, rank_prefix, report_end
from kaitian_mpi.runtime.launcher import SUPERVISED_FOLDER, read_launch
from kaitian_mpi.runtime.lifecycle import register_close
from kaitian_mpi.train.summary import NAME, Summary

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.mpi.topology import RankInfo
    from kaitian_mpi.mpi.world import World


def main() -> None:
    """Run the command."""
    options = sys.argv[1:]
    if make_parser().shows_help(options[:1] or ["-h"]):
        return
    with abort_on_error(PROGRAM):
        chosen = make_parser().parse_args(options)
        configure_logging(chosen.log_level, rank_prefix(), read_launch(os.environ).world_rank)
        check_options(chosen)
        program_flags = own_flags(options)
        start_mpirun_if_requested(PROGRAM, program_flags, options[len(program_flags) :], chosen)
        hide_unused_devices(os.environ, chosen.devices)
        comm = initialize_mpi_on(chosen.network_interface)
        hosts = gather_values(comm, socket.gethostname())
        port, run_id = gather_values(comm, (free_port(), uuid.uuid4().hex))[0]
        set_environment(os.environ, comm.rank, hosts, port, run_id)
        import_torch()
        world = choose_device(comm, chosen)
        finish = extend_torch(world, chosen)
        with told_to_supervisor(comm):
            run_script(chosen.script, chosen.arguments, chosen.module, world.comm)
            finish()
        report_end()


def check_options(chosen: argparse.Namespace) -> None:
    """Check what the parser cannot.

    Raises:
        UserError: there is no script, or a flag has no effect without another.
    """
    if not (chosen.module or os.path.isfile(chosen.script)):
        raise UserError(f"there is no script {chosen.script}; name the file to run")
    if chosen.layout == "replicate" and (chosen.emulate_memory or chosen.shard_parameters):
        flag = "--emulate-memory" if chosen.emulate_memory else "--shard-parameters"
        raise UserError(f"{flag} requires --layout shard or --layout auto")


def choose_device(comm: MPI.Intracomm, chosen: argparse.Namespace) -> World:
    """Choose this rank's device, and set the variables by which the script finds it. Collective."""
    from kaitian_mpi.mpi.world import join_world, set_current_world

    emulated = chosen.emulate_kinds, chosen.emulate_slowdown
    how = chosen.share_device, chosen.group_by, chosen.vendor_library
    world = join_world(comm, chosen.devices, *emulated, *how)
    set_current_world(world)
    local_rank = local_rank_of(world.infos, world.rank, world.device_index)
    os.environ["LOCAL_RANK"] = str(local_rank)
    if world.info.is_on_host:  # without it, Accelerate would train alone
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    os.environ[GROUP_VARIABLE] = world.communication.group_by
    # Also for a script that calls kaitian_mpi.init().
    if chosen.share_device:
        os.environ[SHARE_VARIABLE] = "1"
    if not world.communication.vendor_library:
        os.environ[LIBRARY_VARIABLE] = "0"
    if world.emulation.describe():
        os.environ[KINDS_VARIABLE] = world.emulation.kinds
        os.environ[SLOWDOWN_VARIABLE] = world.emulation.slowdown
    return world


def extend_torch(world: World, chosen: argparse.Namespace) -> Callable[[], None]:
    """Replace what the script uses of torch, and of trainers, as the flags ask for. Collective.

    Returns:
        What to call when the script has ended, on every rank.
    """
    from kaitian_mpi.distributed.startup import use_backend_for
    from kaitian_mpi.integrations.lightning_ranks import use_started_ranks

    use_backend_for([name for name in chosen.backend_override.split(",") if name])
    use_started_ranks(world)
    adaptive = None
    if chosen.adaptive:
        from kaitian_mpi.integrations.adaptive import install

        adaptive = install(world)
    if chosen.layout == "replicate":
        return lambda: None
    from kaitian_mpi.integrations.shard.budget import LayoutSettings
    from kaitian_mpi.integrations.shard.install import Installed

    settings = LayoutSettings(chosen.layout, chosen.shard_parameters, chosen.emulate_memory or "")
    return Installed(world, settings, adaptive.waiting if adaptive else None).end


def set_environment(environ: Any, rank: int, hosts: Sequence[str], port: int, run_id: str) -> None:
    """Set the variables that torchrun sets; MASTER_ADDR and MASTER_PORT given by the user stay."""
    launch = read_launch(environ)
    size = str(len(hosts))
    names = list(dict.fromkeys(hosts))
    environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_size),
        "GROUP_RANK": str(names.index(hosts[rank])),
        "GROUP_WORLD_SIZE": str(len(names)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        # Frameworks that find this one do not start processes themselves.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # torchrun's own process serves the store at MASTER_PORT; here rank 0 must.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    one_host = launch.local_size == len(hosts)  # its name may not resolve
    environ.setdefault("MASTER_ADDR", "localhost" if one_host else hosts[0])
    environ.setdefault("MASTER_PORT", str(port))


def free_port() -> int:
    """Return a port that is currently free on this host; it is not reserved."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def local_rank_of(infos: Sequence[RankInfo], rank: int, device_index: int) -> int:
    """Return the `LOCAL_RANK` by which a script's `cuda:{LOCAL_RANK}` is the rank's own device.

    It is the device's index. CPU ranks have the numbers after those of the host's accelerators.
    """
    rank_info = infos[rank]
    if not rank_info.is_on_host:
        return device_index
    here = [info for info in infos if info.node == rank_info.node]
    before = [
        info for info in here if not info.is_on_host or info.local_rank < rank_info.local_rank
    ]
    return len(before)


def search_first(folder: str) -> None:
    """Have Python look for modules in a folder in place of this command's own, as `python` does."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def run_script(script: str, arguments: Sequence[str], is_module: bool, comm: MPI.Intracomm) -> None:
    """Run as `python script args…` or `python -m module args…`; `sys.exit(0)` means success."""
    sys.argv = ["-m" if is_module else script, *arguments]
    try:
        if is_module:
            search_first(os.getcwd())
            with agree_on_errors(comm):
                find_module(script)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            search_first(str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


@contextmanager
def told_to_supervisor(comm: MPI.Intracomm) -> Iterator[None]:
    """Tell `kaitian-supervise`, if it has started this job, that the script has ended on all ranks.

    That is known only when this process exits: a rank may end early, while others still train.
    """
    folder = os.environ.get(SUPERVISED_FOLDER)
    if not folder:
        yield
        return
    ended: list[bool] = []

    def tell() -> None:
        survived = ulfm.shrink(comm) if ulfm.has_survived_loss() else comm
        if ended and all(gather_values(survived, True)) and survived.rank == 0:
            with suppress(OSError):  # the supervisor then starts it once more
                _write_summary(Path(folder), finished=True)

    with agree_on_errors(comm):
        try:
            if comm.rank == 0:
                _write_summary(Path(folder), finished=False)
        except OSError as error:
            raise UserError(
                f"rank 0 on {socket.gethostname()} cannot write {folder} ({error.strerror}), where "
                "kaitian-supervise reads whether the script has ended; start kaitian-supervise on "
                "the first host, in a folder that can be written"
            ) from error
    register_close(tell)  # what is registered later is closed earlier
    yield
    ended.append(True)


def _write_summary(folder: Path, finished: bool) -> None:
    with replacing(folder / NAME) as file:
        file.write(json_bytes(Summary(finished=finished).to_json()))


def find_module(name: str) -> None:
    """Find a module, or a package's `__main__`; imports the packages that it is in."""
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except ImportError as error:  # without a name: a relative one
            is_candidate = error.name and f"{candidate}.".startswith(f"{error.name}.")
            if error.name and not is_candidate:  # a package's own import
                raise
            spec = None
        if spec is None:
            raise UserError(
                f"-m {name}: no module of this name, or a package without a __main__; start it "
                "from the folder in which `python -m` finds it, or install it"
            )
        if spec.submodule_search_locations is None:
            return


if __name__ == "__main__":
    main()
