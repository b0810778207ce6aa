"""Layout shard in a script's own trainer: what `kaitian-run --layout shard` installs.

Every trainer passes three places of torch. `DistributedDataParallel` gives each gradient's rows to
the ranks that own them, in place of all gradients to all (extend_ddp.py, model_passes.py). The
optimizers step, and keep state for, this rank's rows only (extend_optimizers.py,
owned_optimizer.py). Whoever reads the whole state alone is answered by the owners' threads
(remote_reads.py), as these know what they own of models (local_rows.py) and optimizers
(local_optimizer_state.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from kaitian_mpi.integrations.shard.budget import LayoutSettings
from kaitian_mpi.integrations.shard.extend_clipping import extend_clipping
from kaitian_mpi.integrations.shard.extend_ddp import extend_ddp
from kaitian_mpi.integrations.shard.extend_modules import extend_modules
from kaitian_mpi.integrations.shard.extend_optimizers import extend_optimizers
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import WaitContext


def _unmeasured(what: str) -> AbstractContextManager[None]:
    return nullcontext()


class Installed:
    """The extensions of torch in this process."""

    def __init__(
        self, world: World, settings: LayoutSettings, waits: WaitContext | None = None
    ) -> None:
        """Let the script's models in DDP have owners from now on. Collective.

        Args:
            world: all ranks, each of which runs the script.
            settings: how to lay out models.
            waits: makes the context of waiting for other ranks; None if nobody measures it.
        """
        self._shards = shards = TrainerShards(world, settings, waits or _unmeasured)
        extend = extend_ddp, extend_optimizers, extend_modules, extend_clipping
        self._restore = [extend_one(shards) for extend_one in extend]

    def end(self) -> None:
        """Wait until all ranks' scripts have ended. Collective.

        Raises:
            UserError: another rank's script goes on with its models.
        """
        self._shards.end()

    def close(self) -> None:
        """Take the extensions away again. Collective."""
        while self._restore:
            self._restore.pop()()
        self._shards.close()
