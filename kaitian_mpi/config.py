"""All settings of a training run, in one place.

Each field is a setting of `Training` or a flag of `kaitian-train` by the same name
(`global_batch_size` is `--global-batch-size`); its help text is its documentation. Nothing here
imports torch or MPI, so that a wrong flag is reported before either is loaded.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.errors import UserError

_MAX_COUNT = 10**9
_ABOVE_ZERO = 5e-324  # the smallest float above 0
# Minimum, maximum and the text for the error: values outside would overflow somewhere later.
_RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(
        ("global_batch_size", "batch_size", "epochs", "keep_checkpoints", "snapshot_every"),
        (1, _MAX_COUNT, "a whole number from 1 to 1e9"),
    ),
    **dict.fromkeys(
        (
            *("max_steps", "micro_batch_size", "max_bad_steps", "check_every"),
            *("checkpoint_every", "spares"),
        ),
        (0, _MAX_COUNT, "a whole number from 0 to 1e9"),
    ),
    "relay_memory_mb": (1, 1 << 20, "megabytes, from 1 to 1048576"),
    "workers": (0, 1024, "a whole number from 0 to 1024"),
    "seed": (0, 2**48 - 1, "a whole number from 0 to 2^48 - 1"),
    "lr": (_ABOVE_ZERO, 1e6, "a number above 0 and at most 1e6"),
    "weight_decay": (0, 1e6, "a number from 0 to 1e6"),
    "clip_norm": (0, 1e6, "a number from 0 to 1e6"),
    "benchmark_seconds": (_ABOVE_ZERO, 1e9, "seconds, above 0 and at most 1e9"),
    "log_interval": (0, 1e9, "seconds, from 0 to 1e9"),
    "checkpoint_minutes": (0, 1e9, "minutes, from 0 to 1e9"),
    "step_timeout": (0, 1e9, "seconds, from 0 to 1e9"),
}
LOG_LEVELS = ("debug", "info", "warning", "error")

_PATHS = (
    *("config", "data_dir", "benchmark_cache", "init", "resume", "run_dir", "export"),
    "device_map",
)


def _flag(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "metavar": metavar}
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a task is trained, whatever the task: the settings of `kaitian_mpi.Training`.

    Raises:
        UserError: a value is out of range, or two values contradict each other.
    """

    init: str = _flag(
        "",
        "start from the weights in this file, of torch.save (such as a run's model.pt) or "
        ".safetensors; a run that is resumed has its own",
        metavar="FILE",
    )
    workers: int = _flag(0, "data-loading processes per rank; 0: load in the rank itself")

    global_batch_size: int = _flag(256, "samples per step over all ranks")
    batch_policy: str = _flag(
        "global",
        "global: divide --global-batch-size among the ranks; paper: each rank takes "
        "round(--batch-size x score), so the global batch grows with the devices",
        ("global", "paper"),
    )
    batch_size: int = _flag(64, "samples per step of the fastest rank, with --batch-policy paper")
    balance: str = _flag(
        "adaptive",
        "adaptive: benchmark the ranks, size their batches for the shortest step, and adjust "
        "while training; static: benchmark only; off: equal batches, no benchmark",
        ("adaptive", "static", "off"),
    )
    benchmark_seconds: float = _flag(10.0, "time limit of the benchmark, in seconds")
    benchmark_cache: str = _flag(
        "",
        "folder in which benchmark results are cached, by host, device, model and versions",
        metavar="DIR",
    )
    micro_batch_size: int = _flag(
        0,
        "the most samples that a rank computes at once; larger batches accumulate gradients; "
        "0: as many as fit in memory",
    )
    keep_all: bool = _flag(
        False, "train on every rank, even if excluding slow ranks would make the job faster"
    )

    allreduce: str = _flag(
        "auto",
        "algorithm for gradients that cross device kinds; auto: the fastest, measured at startup",
        ("auto", "flat", "leader", "striped"),
    )
    network_allreduce: str = _flag(
        "auto",
        "how tensors in host memory are reduced between hosts, whatever their kinds of devices; "
        "auto: the fastest, measured at startup; mpi: by MPI's own allreduce",
        ("auto", "mpi", "pairwise", "ring"),
    )
    relay_dtype: str = _flag(
        "fp32",
        "what fp32 gradients cross device kinds as; bf16 halves the bytes; the sums are in fp32",
        ("fp32", "bf16"),
    )
    relay_memory_mb: int = _flag(
        32, "host memory for buffers between an accelerator and MPI, per process group, in MB"
    )
    wire: str = _flag(
        "fp32",
        "what gradients are sent as between hosts: fp32, or fewer bits for slow links; what is "
        "rounded off is sent with the next step's",
        ("fp32", "bf16", "int8", "int4"),
    )
    emulate_slowdown: str = _flag(
        "",
        "slow ranks down by sleeping: rank:factor or rank:factor@step, such as "
        "2:3.0,3:3@50,3:1@90 (results are marked 'emulated'; default $KAITIAN_EMULATE_SLOWDOWN)",
        metavar="LIST",
    )

    parity: bool = _flag(
        True,
        "before training, compare forward and backward of a few samples between the kinds of "
        "devices, if there are several; a kind that differs by more than rounding ends the job",
    )

    epochs: int = _flag(10, "passes over the training set")
    max_steps: int = _flag(0, "stop after this many steps; 0: no limit besides --epochs")
    precision: str = _flag(
        "fp32",
        "precision of forward and backward; weights and gradient sums stay fp32; auto: fp32 or "
        "bf16, whichever is faster on the rank",
        ("fp32", "bf16", "fp16", "auto"),
    )
    memory_format: str = _flag(
        "contiguous",
        "memory format of images; auto: whichever is faster on the rank",
        ("auto", "contiguous", "channels_last"),
    )
    sync_bn: bool = _flag(
        False,
        "normalize batch norm by the statistics of the global batch, in place of those of each "
        "rank's own samples; a share is then computed at once, without micro-batches",
    )
    max_bad_steps: int = _flag(
        20, "end the run after this many consecutive steps with NaN or Inf gradients; 0: never"
    )
    check_every: int = _flag(
        200, "steps between comparisons of the ranks' weights; 0: only after a rank is lost"
    )

    resume: str = _flag(
        "",
        "auto: resume from the newest valid checkpoint in --run-dir, or start from scratch if "
        "there is none; or a checkpoint's .pt file",
        metavar="auto|FILE",
    )
    checkpoint_every: int = _flag(0, "steps between checkpoints; 0: use --checkpoint-minutes")
    checkpoint_minutes: float = _flag(
        10.0, "minutes between checkpoints; 0: only by --checkpoint-every and after each epoch"
    )
    keep_checkpoints: int = _flag(3, "number of checkpoints to keep, besides the best")
    spares: int = _flag(
        0, "number of spare ranks: the last ones stand by, each ready to replace a lost rank"
    )
    step_timeout: float = _flag(
        0.0,
        "seconds after which a rank that hangs is killed; 0: 20 times the median step, at least 60",
    )
    snapshots: str = _flag(
        "",
        "keep the state in each host's memory (/dev/shm) under this name, to restart from when a "
        "host is lost; kaitian-supervise sets this itself",
    )
    snapshot_every: int = _flag(10, "steps between these snapshots")

    seed: int = _flag(0, "seed of weights, sample order, augmentation and dropout")
    run_dir: str = _flag("", "folder for results; without it, nothing is written", metavar="DIR")
    export: str = _flag(
        "",
        "write the weights of the finished run to this .safetensors file as well (needs the extra "
        "'export')",
        metavar="FILE",
    )
    log_interval: float = _flag(2.0, "seconds between progress lines")

    def __post_init__(self) -> None:
        for name in _PATHS:  # a shell does not expand the tilde of --flag=~/folder
            if isinstance(given := getattr(self, name, None), str | os.PathLike):
                object.__setattr__(self, name, os.path.expanduser(os.fspath(given)))
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise _out_of_range(field.name, value, f"one of {', '.join(choices)}")
            if needed := wrong_type(field, value):
                raise _out_of_range(field.name, value, needed)
        self._check_ranges()
        self._check_names()

    def _check_ranges(self) -> None:
        for name, (least, most, needed) in _RANGES.items():
            value = getattr(self, name, least)  # not every setting is one of Training's
            if not least <= value <= most:  # false for NaN
                raise _out_of_range(name, value, needed)

    def _check_names(self) -> None:
        if self.sync_bn and self.micro_batch_size:
            raise UserError(
                "--sync-bn: found --micro-batch-size as well, needed only one of them: the "
                "statistics are those of a whole step"
            )
        if self.snapshots and not self.snapshots.isalnum():
            raise _out_of_range("snapshots", self.snapshots, "a name of letters and digits")
        if self.resume == "auto" and not self.run_dir:
            raise UserError("--resume auto needs --run-dir, the folder of the run to resume")
        if self.export and Path(self.export).suffix != ".safetensors":
            raise _out_of_range(
                "export",
                self.export,
                "a file named *.safetensors; as torch.save writes them, the weights are in the run "
                "folder, checkpoints/model.pt",
            )

    def choose_folder(self) -> Path | None:
        """Return the folder for results; None where nothing is to be written."""
        return Path(self.run_dir) if self.run_dir else None


def _metadata_of(config: type, name: str) -> Mapping[str, Any]:
    """Return what describes a field that a subclass gives another default."""
    return next(f.metadata for f in dataclasses.fields(config) if f.name == name)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """The settings of one `kaitian-train` run: what it trains, on which devices, and the above.

    It trains a task of the user's own, or a model on a dataset of images.

    Raises:
        UserError: a value is out of range, or two values contradict each other.
    """

    config: str = _flag(
        "",
        "read flags from this TOML file, such as lr = 0.1 or global-batch-size = 64; flags on the "
        "command line win",
        metavar="FILE",
    )
    task: str = _flag(
        "",
        "train this task in place of --model and --dataset: module:function, a function that "
        "returns a kaitian_mpi.Task",
        metavar="MODULE:FUNCTION",
    )
    set: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "give the function of --task a keyword argument; may be repeated; the value "
            "is read as TOML (3, 1e-4, true, [1, 2]), or else as text",
            "choices": (),
            "metavar": "KEY=VALUE",
        },
    )
    model: str = _flag(
        "mobilenetv2",
        "mobilenetv2, resnet18, cnn, or module:factory: a callable that takes num_classes and "
        "returns a torch.nn.Module",
    )
    dataset: str = _flag(
        "digits",
        "digits, cifar10, mnist, synthetic, or module:factory: a callable that returns "
        "(train, validation) or one map-style dataset of (input, class) pairs",
    )
    data_dir: str = _flag("", "folder with the dataset's official files", metavar="DIR")
    val_split: float = _flag(
        0.2, "fraction of the training set held out if the dataset has no test set"
    )
    augment: str = _flag(
        "auto",
        "random crop and horizontal flip, seeded per sample; auto: the dataset's default",
        ("auto", "none", "crop", "crop-flip"),
    )

    devices: str = _flag(
        "auto", "auto, cpu, or a list by local rank, such as cuda:0,cuda:1,cpu", metavar="LIST"
    )
    device_map: str = _flag(
        "",
        "a TOML file with the devices of each host's ranks, such as node-a = "
        '["cuda:0", "cuda:1"]; read by rank 0, in place of --devices',
        metavar="FILE",
    )
    share_device: bool = _flag(
        False,
        "let several ranks use one device; the ranks of such a group communicate through host "
        "memory, because the vendors' libraries refuse them (default $KAITIAN_SHARE_DEVICE)",
    )
    network_interface: str = _flag(
        "",
        "use only these network interfaces between hosts, such as eth0 or eth0,eth1; needed on "
        "every host (default: all that MPI finds)",
        metavar="LIST",
    )
    emulate_kinds: str = _flag(
        "",
        "label CPU ranks with device kinds by world rank, such as gpu,gpu,mlu,mlu "
        "(results are marked 'emulated'; default $KAITIAN_EMULATE_KINDS)",
        metavar="LIST",
    )

    optimizer: str = _flag(
        "sgd",
        "sgd, with --momentum and --nesterov, or adamw, for which --lr is 0.001 and --weight-decay "
        "0.01 unless given",
        ("sgd", "adamw"),
    )
    lr: float = _flag(0.05, "peak learning rate")
    momentum: float = _flag(0.9, "momentum of SGD")
    nesterov: bool = _flag(True, "use Nesterov momentum")
    weight_decay: float = _flag(
        5e-4, "weight decay of weight matrices and filters; not applied to biases and norms"
    )
    clip_norm: float = _flag(
        0.0, "largest norm of the whole gradient, which is scaled down to it; 0: no limit"
    )
    label_smoothing: float = _flag(0.0, "label smoothing of the cross-entropy, from 0 to below 1")
    schedule: str = _flag("cosine", "learning rate after the warmup", ("cosine", "constant"))
    warmup: float = _flag(
        0.25, "fraction of all steps over which the learning rate warms up from near 0"
    )

    log_level: str = _flag(
        "info", "lowest level of log messages to show; debug shows those of every rank", LOG_LEVELS
    )
    memory_format: str = dataclasses.field(
        default="auto", metadata=_metadata_of(TrainingConfig, "memory_format")
    )
    run_dir: str = _flag(
        "", "folder for results; default runs/<model or task>-<date>-<time>", metavar="DIR"
    )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        for name in ("momentum", "label_smoothing", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise _out_of_range(name, getattr(self, name), "a number from 0 to below 1")
        if not 0 < self.val_split < 1:
            raise _out_of_range("val_split", self.val_split, "a fraction between 0 and 1")

    def _check_names(self) -> None:
        super()._check_names()
        if self.nesterov and self.momentum == 0:
            raise UserError("--nesterov needs --momentum above 0; set it, or give --no-nesterov")

    @property
    def run_name(self) -> str:
        """The name of the task or the model in a form usable as a folder name."""
        return Path((self.task or self.model).replace(":", "-")).name

    def choose_folder(self) -> Path:
        """Return the folder for results: by default one named after the time, to the second."""
        name = f"{self.run_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return Path(self.run_dir) if self.run_dir else Path("runs") / name


def flag_name(field_name: str) -> str:
    """Return a field's command-line flag: `--max-steps` for `max_steps`."""
    return "--" + field_name.replace("_", "-")


def wrong_type(field: dataclasses.Field[Any], value: object) -> str:
    """Return what a field's value would have to be; empty if it is that."""
    kind = dict if field.default is dataclasses.MISSING else type(field.default)
    # A whole number may stand where a float may.
    if type(value) is kind or (kind is float and type(value) is int):
        return ""
    names = {int: "a whole number", float: "a number", bool: "True or False", dict: "a table"}
    return names.get(kind, "a text")


def _out_of_range(name: str, found: object, needed: str) -> UserError:
    return UserError(f"{flag_name(name)}: found {found!r}, needed {needed}")
