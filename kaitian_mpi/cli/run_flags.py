"""The flags of `kaitian-run`, which `kaitian-supervise` reads as well."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kaitian_mpi.cli.flags import OneLineParser, add_flags, add_launch_flags

PROGRAM = "kaitian-run"
SECTIONS = {
    "devices and communication": "devices share_device vendor_library group_by network_interface",
    "emulation and output": "emulate_kinds emulate_slowdown emulate_memory log_level",
}


def make_parser() -> OneLineParser:
    """Return the command's parser; arguments after the script's name are passed to the script."""
    parser = OneLineParser(
        PROGRAM,
        "Run a torch.distributed script on every rank.",
        f"{PROGRAM} -n 4 --backend-override nccl,gloo train.py --lr 0.1",
    )
    add_launch_flags(parser)
    parser.add(
        "--backend-override",
        "backends that kaitian replaces in the script, such as nccl,gloo",
        "LIST",
    )
    parser.add("--adaptive", "divide the batches of the script's trainer by the ranks' speed")
    parser.add_argument(
        "--layout",
        choices=("replicate", "shard", "auto"),
        default="replicate",
        help="shard: each rank keeps gradients and optimizer state of its rows only, by its "
        "memory, and parameters, too, if they fit no rank whole; auto: shard if a replica does "
        "not fit every rank",
    )
    parser.add(
        "--shard-parameters",
        "with --layout shard: keep only its own rows of large parameters on each rank, even if "
        "they fit whole, which leaves more memory to activations",
    )
    add_flags(parser, SECTIONS)
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="run a module or package by its name in place of a file, as python -m does",
    )
    parser.add_argument("script", help="the Python file to run; with -m, the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def own_flags(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments of this command before the script's name."""
    chosen = make_parser().parse_args(arguments)
    end = len(arguments) - len(chosen.arguments)
    while arguments[end - 1] != chosen.script:  # argparse has dropped a "--" after it
        end -= 1
    return arguments[: end - 1]
