"""Runs a script whose models have owners by given shares, whatever the ranks' memory is.

owned.py SHARES whole|sharded SCRIPT ARGUMENTS...
"""

import runpy
import sys
from pathlib import Path

from kaitian_mpi.balance.ownership import without_mirrors
from kaitian_mpi.distributed.sharded_model import can_be_sharded
from kaitian_mpi.integrations.shard import trainer_shards
from kaitian_mpi.integrations.shard.budget import Owners

given, kind = sys.argv[1:3]
shares = [float(share) for share in given.split(",")]


def find_owners(settings, world, model, optimizers):
    numbers = [number for number, p in enumerate(model.parameters()) if can_be_sharded(p)]
    sharded = frozenset(numbers if kind == "sharded" else ())
    return Owners(without_mirrors(shares[: world.size]), sharded, True, f"owners: {shares}, {kind}")


trainer_shards.find_owners = find_owners
sys.argv = sys.argv[3:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
