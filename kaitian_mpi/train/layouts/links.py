"""Measures the messages between two ranks."""

from __future__ import annotations

import itertools
import time

import torch

from kaitian_mpi.balance.pipeline import Hop
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.layouts.peers import PeerGroups, join_peers

_MIN_ROUNDS = 3
_MAX_ROUNDS = 100
_ROUNDS_SEC = 0.3  # longer than others hold the cores in each round
_TRIAL_BYTES = 1 << 20
_LEAST_PART = 0.1  # of a large message's time, at least, is that of its bytes


def measure_links(world: World) -> dict[str, Hop]:
    """Return the times of messages between ranks of two kinds, if possible hosts. Collective.

    Within a kind as well; a pair of kinds is in alphabetical order.
    """
    times: dict[str, list[float]] = {}
    for one, other in itertools.combinations_with_replacement(sorted(set(world.kinds)), 2):
        ranks = _apart(world, one, other)
        if ranks is None:
            continue
        peers = join_peers(world, [ranks])
        if world.rank in ranks:
            enter_phase("measuring a link", waits=True, limited=False)
            small, large = (_one_way(world, size, ranks, peers) for size in (8, _TRIAL_BYTES))
            times[f"{one} {other}"] = [
                small,
                max(large - small, _LEAST_PART * large) / _TRIAL_BYTES,
            ]
        peers.close()
    enter_phase("waiting for the other ranks' links", waits=True, limited=False)
    return {
        key: Hop(*hop)
        for rank_times in gather_values(world.comm, times)
        for key, hop in rank_times.items()
    }


def _apart(world: World, one: str, other: str) -> tuple[int, int] | None:
    """Return a rank of each of two kinds, on different hosts if there are such."""
    infos = world.infos
    pairs = [
        (a, b)
        for a, b in itertools.permutations(range(world.size), 2)
        if (infos[a].kind, infos[b].kind) == (one, other)
    ]
    return max(pairs, key=lambda pair: infos[pair[0]].node != infos[pair[1]].node, default=None)


def _one_way(world: World, size: int, ranks: tuple[int, int], peers: PeerGroups) -> float:
    """Return the seconds of so many bytes from one rank's device to the other's, by both ranks.

    Of many round trips the shortest: a short message waits longer for a core than on its way.
    """
    # On the devices, as activations are: copies to and from the host are part of the way.
    buffer = torch.zeros(size, dtype=torch.uint8, device=world.device)
    seconds: list[float] = []
    while not buffer[0]:
        if world.rank == ranks[0]:  # which tells the other in each message whether it is the last
            rounds = len(seconds) + 1
            is_enough = sum(seconds) >= _ROUNDS_SEC
            is_last = rounds >= _MAX_ROUNDS or (rounds >= _MIN_ROUNDS and is_enough)
            buffer[0] = int(is_last)
        world.synchronize()
        begin = time.perf_counter()
        for source, target in (ranks, ranks[::-1]):
            if source == world.rank:
                peers.send_to(target, buffer, 0).wait()
            else:
                with peers.beside_computing():
                    message = peers.receive_from(source, buffer, 0)
                message.wait()
            world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / 2
