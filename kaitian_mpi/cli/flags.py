"""Builds argument parsers from the fields of `TrainConfig`, and reads a config from a command."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from kaitian_mpi import __version__
from kaitian_mpi.cli.logs import print_text
from kaitian_mpi.config import OF_IMAGES, TrainConfig, flag_name
from kaitian_mpi.config.training import check_given
from kaitian_mpi.config.values import PATHS
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.launcher import read_launch

# The sections of --help, and their flags by the fields' names. A setting that is in none of them is
# a flag, too, but --help leaves it out.
SECTIONS = {
    "common options": "model dataset task devices global_batch_size epochs lr precision "
    "run_dir resume",
    "model and data": "data_dir set config init workers seed export",
    "optimization": "max_steps optimizer weight_decay clip_norm schedule sync_bn",
    "balancing": "balance benchmark_seconds micro_batch_size keep_all",
    "devices and communication": "share_device network_interface layout allreduce wire "
    "emulate_kinds emulate_slowdown emulate_memory",
    "checkpoints and failures": "checkpoint_every checkpoint_minutes spares",
    "output and metrics": "progress quiet tensorboard wandb mlflow timeline",
}
SHOWN = frozenset(name for names in SECTIONS.values() for name in names.split())
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
HIDDEN = FIELDS.keys() - SHOWN
_LAUNCH_FLAG = re.compile(r"-n(p?(=.*)?|\d+)|--hostfile(=.*)?|--no-fault-tolerance")
_LAUNCH_FLAGS_WITH_VALUE = ("-n", "-np", "--hostfile")
MAX_RANKS = 100_000
_SIMILAR = 0.75
_COMPLETION = "_ARGCOMPLETE"  # set by a shell's completion with argcomplete
_NOT_EMPTY = (*PATHS, "task", "devices")
_ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
# Code such as x.view() may rely on it.
_TASK_DEFAULTS: dict[str, Any] = {"memory_format": "contiguous"}


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises `UserError` instead of printing its usage and exiting."""

    def __init__(self, program: str, description: str, example: str, usage: str | None = None):
        super().__init__(
            prog=program,
            usage=usage,
            description=description,
            epilog=f"example: {example}",
            allow_abbrev=False,
        )
        self._completes = False
        self.add_argument(
            "--version",
            action="version",
            version=f"{program} {__version__}",
            help="show the package's version and exit",
        )

    def add(self, flag: str, text: str, metavar: str = "", default: Any = "") -> None:
        """Add a flag, with a value of the default's type if it has a metavar."""
        if metavar:
            kind = str if default is None else type(default)
            self.add_argument(flag, help=text, type=kind, default=default, metavar=metavar)
        else:
            self.add_argument(flag, help=text, action="store_true")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse arguments, or answer a shell's question and exit, see `complete`."""
        self.complete()
        return super().parse_known_args(*args, **kwargs)

    def complete(self) -> None:
        """Answer a shell that asks how an argument can be completed, if argcomplete is installed.

        Then this process ends. Without the question, nothing of that is loaded.
        """
        if _COMPLETION in os.environ and not self._completes:
            self._completes = True  # argcomplete parses, too
            with suppress(ImportError):
                from argcomplete import autocomplete

                autocomplete(self)

    def shows_help(self, arguments: Sequence[str]) -> bool:
        """Return whether arguments ask for help or the version; print it, on the first rank."""
        self.complete()
        help_flags = {"-h", "--help", "--version"} & set(arguments)
        if help_flags and read_launch(os.environ).world_rank == 0:
            print_text(
                f"{self.prog} {__version__}" if help_flags == {"--version"} else self.format_help()
            )
        return bool(help_flags)

    def error(self, message: str) -> NoReturn:
        """Raise the error as a `UserError`."""
        raise UserError(f"{message}{self._similar_flag(message)}; see {self.prog} --help")

    def _similar_flag(self, message: str) -> str:
        """Return the flag that was probably meant by an unknown one."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        flag = next((word for word in words.split() if word.startswith("-")), "").partition("=")[0]
        parser_flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        close = (
            difflib.get_close_matches(flag, parser_flags, n=1, cutoff=_SIMILAR) if unknown else []
        )
        return f"; did you mean {close[0]}?" if close else ""


def make_parser(program: str) -> OneLineParser:
    """Return the parser of `kaitian-train`: one flag for each field of `TrainConfig`."""
    parser = OneLineParser(
        program,
        "Train a PyTorch model on a mix of accelerators, with one process (a rank) per device. Set "
        "anything that has no flag below with --set or in a --config file; docs/cli.md lists all "
        "settings.",
        f"{program} -n 4 --model mobilenetv2",
        f"{program} -n N [flags]  or  mpirun -np N {program} [flags]",
    )
    add_launch_flags(parser)
    add_flags(parser, SECTIONS, HIDDEN)
    return parser


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which a command starts mpirun itself."""
    group = parser.add_argument_group("starting mpirun")
    group.add_argument(
        "-n",
        "-np",
        dest="ranks",
        type=_rank_count,
        metavar="N",
        help="start mpirun with N ranks of this command, also as root and with more ranks than "
        "cores, and print its command; with --hostfile, the default is a rank for each slot",
    )
    group.add_argument(
        "--hostfile",
        metavar="FILE",
        help="start mpirun on the hosts of this file, with lines such as node-a slots=4, and pass "
        "on the environment; each host is asked first",
    )
    group.add_argument(
        "--no-fault-tolerance",
        action="store_true",
        help="let the loss of a rank end the job: start mpirun without --with-ft ulfm",
    )


def add_flags(
    parser: argparse.ArgumentParser, sections: Mapping[str, str], hidden: Iterable[str] = ()
) -> None:
    """Add the flags of some fields of `TrainConfig`."""
    for section, names in sections.items():
        group = parser.add_argument_group(section)
        for name in names.split():
            _add_flag(group, FIELDS[name])
    for name in sorted(hidden):
        _add_flag(parser, FIELDS[name]).help = argparse.SUPPRESS


def without_launch_flags(arguments: Sequence[str]) -> list[str]:
    """Return arguments without the flags with which a command starts mpirun."""
    other_arguments = []
    words = iter(arguments)
    for word in words:
        if not _LAUNCH_FLAG.fullmatch(word):
            other_arguments.append(word)
        elif word in _LAUNCH_FLAGS_WITH_VALUE:
            next(words)
    return other_arguments


def launch_flags_in(arguments: Sequence[str]) -> list[str]:
    """Return the flags among arguments with which a command starts mpirun."""
    return [word for word in arguments if _LAUNCH_FLAG.fullmatch(word)]


def start_mpirun_if_requested(
    program: str, launch_flags: Sequence[str], others: Sequence[str], chosen: argparse.Namespace
) -> None:
    """Start mpirun in place of this process if a flag asks for that; see `launch.start_mpirun`.

    Args:
        program: The command's name.
        launch_flags: Its launch_flags arguments, from which `chosen` was parsed.
        others: The arguments after them, such as a script and its launch_flags.
        chosen: The values of `add_launch_flags`, and others.
    """
    if chosen.ranks is not None or chosen.hostfile is not None or chosen.no_fault_tolerance:
        from kaitian_mpi.cli.launch import start_mpirun  # a rank needs nothing of it

        start_mpirun(program, [*without_launch_flags(launch_flags), *others], chosen)


def _rank_count(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) < 9
    if not is_number or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text[:20]!r} is not a number of ranks; give at least 1 and at most {MAX_RANKS:,}"
        )
    return int(text)


def parse_config(program: str, arguments: Sequence[str]) -> TrainConfig:
    """Parse the arguments of `kaitian-train` into a config."""
    return TrainConfig(**parse_settings(make_parser(program), arguments).settings)


class Parsed(NamedTuple):
    """The contents of a command line."""

    settings: dict[str, Any]
    """The fields of `TrainConfig` that it sets, on the command line or in the file of --config."""
    others: argparse.Namespace
    """The command's own flags."""
    by_set: frozenset[str]
    """The fields that --set sets."""


def parse_settings(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Parsed:
    """Parse command-line arguments."""
    # argparse sets a default only if the namespace has no value yet.
    unset = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))
    chosen = vars(parser.parse_args(arguments, unset))
    from_flags = {name: chosen[name] for name in FIELDS if chosen.get(name) is not None}
    others = argparse.Namespace(**{name: chosen[name] for name in chosen.keys() - FIELDS.keys()})
    in_file = read_config_file(from_flags["config"]) if from_flags.get("config") else {}
    task = from_flags.get("task", in_file.get("task"))
    by_set, table = _sort_set(from_flags.pop("set", []), bool(task))
    if twice := sorted(by_set.keys() & from_flags.keys()):
        raise UserError(f"--set and {flag_name(twice[0])} set the same; give only one of them")
    settings = {**in_file, **from_flags, **by_set}
    for name in _NOT_EMPTY:  # such as the value of a shell's variable that is not set
        if settings.get(name) == "" and name not in in_file:
            raise UserError(f"{flag_name(name)} has an empty value; give one, or omit it")
    if table or "set" in in_file:
        settings["set"] = {**in_file.get("set", {}), **table}
    _check_combinations(settings)
    own_defaults = _TASK_DEFAULTS if task else {}
    own_defaults |= _ADAMW_DEFAULTS if settings.get("optimizer") == "adamw" else {}
    return Parsed({**own_defaults, **settings}, others, frozenset(by_set))


def read_config_file(path: str) -> dict[str, Any]:
    """Return the settings in a file of `--config`, by the fields' names.

    A key is a flag's name without `--`, with `-` or `_` between its words; `set` is a table.
    """
    from kaitian_mpi.supervise.environments import read_toml

    names = FIELDS.keys() - {"config"}
    settings: dict[str, Any] = {}
    for key, value in read_toml("--config", path).items():
        name = key.replace("-", "_")
        if name not in names:
            raise UserError(
                f"--config {path}: there is no setting {key!r}{_hint(name, names)}; write a flag "
                "of kaitian-train without its --"
            )
        if name in settings:
            raise UserError(f"--config {path}: {key} is set twice; keep one of them")
        settings[name] = value
    table = settings.get("set", {})
    if not isinstance(table, dict):
        raise UserError(f'--config {path}: "set" must be a table of arguments, not {table!r}')
    for key, value in table.items():
        if not key.isidentifier():
            raise UserError(f"--config {path}: set: {key!r} cannot be the name of an argument")
        if not _is_json(value):
            raise UserError(
                f"--config {path}: set: {key} is a date or time, which a run's config.json cannot "
                "hold; put it in quotes"
            )
    return settings


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0].replace('_', '-')}?" if close else ""


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _sort_set(given: Sequence[str], has_task: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide what --set was given into settings and arguments of the task's function.

    With --task, a name is a setting only if --help has no flag for it.
    """
    of_config = HIDDEN - OF_IMAGES if has_task else FIELDS.keys() - {"config", "task", "set"}
    settings: dict[str, Any] = {}
    table: dict[str, Any] = {}
    for setting in given:
        key, equals, text = setting.partition("=")
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(f"--set {setting!r} is not name=value; write it like --set lr=3e-4")
        if name in of_config:
            is_text = isinstance(FIELDS[name].default, str)
            settings[name] = text if is_text else read_value(f"--set {name}", text)
        elif has_task and key.isidentifier():
            table[key] = read_value(f"--set {key}", text)
        else:
            raise UserError(
                f"--set {key}: there is no such setting{_hint(name, of_config)}; an argument of "
                "your own function requires --task"
            )
    return settings, table


def _check_combinations(given: Mapping[str, Any]) -> None:
    """Check that the flags given are those of one form, a task or a model, and of the optimizer."""
    check_given(given)

    def named(fields: Container[str]) -> str:
        return ", ".join(flag_name(name) for name in given if name in fields)

    if given.get("task") and (of_images := named(OF_IMAGES)):
        raise UserError(
            f"{of_images} cannot be combined with --task; set it in the task's own code, "
            "with --set for its arguments"
        )
    if "image_size" in given and given.get("dataset") != "imagefolder":
        raise UserError(
            "--image-size has an effect with --dataset imagefolder only; other datasets have a "
            "size of their own"
        )
    if not given.get("task") and given.get("set"):
        raise UserError(
            '"set" in the --config file is for arguments of the --task function; add --task'
        )
    if given.get("optimizer") == "adamw" and (of_sgd := named(("momentum", "nesterov"))):
        raise UserError(
            f"{of_sgd} cannot be combined with --optimizer adamw, which has no momentum "
            "of this kind; remove one of them"
        )


def read_value(name: str, text: str) -> Any:
    """Return a TOML value, or the text itself if it is none."""
    if text in ("True", "False", "None"):  # as a string, each of them would be true
        raise UserError(
            f"{name}={text}: values are read as TOML; write true or false, or '\"{text}\"' for the "
            "string"
        )
    try:
        read = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        # TOML has digits on both sides of a point, unlike Python.
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", text) else text
    return read["value"] if len(read) == 1 and _is_json(read) else text


def _add_flag(group: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> argparse.Action:
    default = field.default
    about = field.metadata
    shown = f" (default {'on' if default is True else default})"
    has_own = default in ("", 0) or "(default" in about["help"]
    options: dict[str, Any] = {
        "default": default,
        "help": (about["help"] + ("" if has_own else shown)).replace("%", "%%"),
    }
    if default is dataclasses.MISSING:
        options = {"action": "append", "help": about["help"], "metavar": about["metavar"]}
    elif isinstance(default, bool):
        options["action"] = argparse.BooleanOptionalAction
    else:
        kind = type(default)
        metavar = about["metavar"] or {int: "N", float: "X", str: "NAME"}[kind]
        options |= {"type": kind, "choices": about["choices"] or None}
        options["metavar"] = None if about["choices"] and not about["metavar"] else metavar
    return group.add_argument(flag_name(field.name), **options)
