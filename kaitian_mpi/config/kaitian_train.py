"""The settings of `kaitian-train`: those of a training run, and what it trains on which devices."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.config.training import TrainingConfig
from kaitian_mpi.config.values import ABOVE_ZERO, BELOW_ONE, LOG_LEVELS, flag_name, setting
from kaitian_mpi.errors import UserError

OF_IMAGES = frozenset(
    (
        *("model", "dataset", "data_dir", "image_size", "val_split", "augment", "optimizer", "lr"),
        *("momentum", "nesterov", "weight_decay", "clip_norm", "label_smoothing", "schedule"),
        "warmup",
    )
)
"""The fields of image classification, which a task has in its own code."""
MODELS = ("mobilenetv2", "resnet18", "cnn")
DATASETS = ("digits", "cifar10", "mnist", "synthetic", "imagefolder")
GROUPINGS = ("auto", "kind", "kind-and-host")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """The settings of one `kaitian-train` run: what it trains, on which devices, and the above.

    It trains a task of the user's own, or a model on a dataset of images.
    """

    config: str = setting(
        "",
        "read flags from this TOML file, such as lr = 0.1 or global-batch-size = 64; flags on the "
        "command line win",
        metavar="FILE",
    )
    task: str = setting(
        "",
        "train this task in place of --model and --dataset: module:function, a function that "
        "returns a kaitian_mpi.Task",
        metavar="MODULE:FUNCTION",
    )
    set: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "set a setting that has no flag here, such as check_every=50; with --task, "
            "any other name is an argument of its function; may be repeated; values are TOML (3, "
            "1e-4, true, [1, 2]) or else text",
            "choices": (),
            "metavar": "NAME=VALUE",
        },
    )
    model: str = setting(
        "mobilenetv2",
        "mobilenetv2, resnet18, cnn, or module:factory: a callable that takes num_classes and "
        "returns a torch.nn.Module",
    )
    dataset: str = setting(
        "digits",
        "digits, cifar10, mnist, synthetic, imagefolder (pictures in --data-dir, in a folder for "
        "each class, resized to --image-size), or module:factory: a callable that returns "
        "(train, validation) or one map-style dataset of (input, class) pairs",
    )
    data_dir: str = setting(
        "", "folder with the dataset's official files, or your pictures", metavar="DIR"
    )
    image_size: int = setting(
        64,
        "with --dataset imagefolder: width and height in pixels to which the middle square of each "
        "picture is resized",
        least=8,
        most=8192,
    )
    val_split: float = setting(
        0.2,
        "fraction of the training set held out if the dataset has no test set",
        least=ABOVE_ZERO,
        most=BELOW_ONE,
    )
    augment: str = setting(
        "auto",
        "random crop and horizontal flip, seeded per sample; auto: the dataset's default",
        ("auto", "none", "crop", "crop-flip"),
    )

    devices: str = setting(
        "auto", "auto, cpu, or a list by local rank, such as cuda:0,cuda:1,cpu", metavar="LIST"
    )
    share_device: bool = setting(
        False,
        "let several ranks use one device; the ranks of such a group communicate through host "
        "memory, because the vendors' libraries refuse them (default $KAITIAN_SHARE_DEVICE)",
    )
    vendor_library: bool = setting(
        True,
        "use the vendors' collective libraries, such as NCCL; --no-vendor-library on any rank, or "
        "KAITIAN_VENDOR_LIBRARY=0 there: no rank uses them, and all groups communicate through "
        "host memory, which is slower",
    )
    group_by: str = setting(
        "auto",
        "group ranks by device kind, or by kind and host, so that vendors' libraries never "
        "communicate between hosts; auto: kind or, if several kinds are on several hosts and "
        "--allreduce is auto, the faster, measured at startup (default $KAITIAN_GROUP_BY)",
        GROUPINGS,
    )
    network_interface: str = setting(
        "",
        "use only these network interfaces between hosts, such as eth0 or eth0,eth1; needed on "
        "every host (default: all that MPI finds)",
        metavar="LIST",
    )
    emulate_kinds: str = setting(
        "",
        "label CPU ranks with device kinds by world rank, such as gpu,gpu,mlu,mlu "
        "(results are marked 'emulated'; default $KAITIAN_EMULATE_KINDS)",
        metavar="LIST",
    )

    optimizer: str = setting(
        "sgd",
        "sgd, with --momentum and --nesterov, or adamw, for which --lr is 0.001 and --weight-decay "
        "0.01 unless given",
        ("sgd", "adamw"),
    )
    lr: float = setting(0.05, "peak learning rate", least=ABOVE_ZERO)
    momentum: float = setting(0.9, "momentum of SGD", most=BELOW_ONE)
    nesterov: bool = setting(True, "use Nesterov momentum")
    weight_decay: float = setting(
        5e-4, "weight decay of weight matrices and filters; not applied to biases and norms"
    )
    clip_norm: float = setting(
        0.0, "clip the norm of the whole gradient to this value; 0: no clipping"
    )
    label_smoothing: float = setting(
        0.0, "label smoothing of the cross-entropy, from 0 to below 1", most=BELOW_ONE
    )
    schedule: str = setting("cosine", "learning rate after the warmup", ("cosine", "constant"))
    warmup: float = setting(
        0.25,
        "fraction of all steps over which the learning rate warms up from near 0",
        most=BELOW_ONE,
    )

    log_level: str = setting(
        "info", "lowest level of log messages to show; debug shows those of every rank", LOG_LEVELS
    )
    memory_format: str = dataclasses.field(
        default="auto", metadata=TrainingConfig.__dataclass_fields__["memory_format"].metadata
    )
    run_dir: str = setting(
        "", "folder for results; default runs/<model or task>-<date>-<time>", metavar="DIR"
    )

    def _check_names(self) -> None:
        super()._check_names()
        known_names = ("model", self.model, MODELS), ("dataset", self.dataset, DATASETS)
        for flag, name, built_in in known_names:
            if name not in built_in and ":" not in name:
                raise UserError(
                    f"--{flag}: there is no {flag} {name!r}; give {', '.join(built_in)} or "
                    "module:factory"
                )
        if self.nesterov and self.momentum == 0:
            raise UserError("--nesterov requires --momentum above 0; set it, or give --no-nesterov")

    def spell(self, **settings: str) -> str:
        """Return the text by which a user gives some settings: their flags."""
        return " ".join(f"{flag_name(name)} {value}" for name, value in settings.items())

    def word(self, text: str) -> str:
        """Return a message that names flags: as it is."""
        return text

    def choose_folder(self) -> Path:
        """Return the folder for results: by default one named after the time, to the second."""
        name = Path((self.task or self.model).replace(":", "-")).name
        named = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return Path(self.run_dir) if self.run_dir else named
