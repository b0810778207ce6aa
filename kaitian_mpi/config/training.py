"""The settings of a training run, whatever it trains."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.config.values import (
    ABOVE_ZERO,
    MAY_DIFFER,
    PATHS,
    flag_name,
    out_of_range,
    outside,
    setting,
    wrong_type,
)
from kaitian_mpi.errors import UserError

_FLAG = (
    r"(?<![\w/.-])--(?P<name>[a-z]+(?:-[a-z]+)*)"
    r"(?: (?P<value>auto|experts|paper|pipeline|replicate|shard)\b)?"
)

_EXACT = ("shard", "pipeline", "experts")
MAX_EXPERT_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings of `kaitian_mpi.Training`: how a task is trained.

    Raises:
        UserError: a value is out of range, or two values contradict each other.
    """

    init: str = setting(
        "",
        "start from the weights in this file, written by torch.save (such as a run's model.pt) or "
        ".safetensors; ignored if the run resumes from a checkpoint",
        metavar="FILE",
    )
    workers: int = setting(
        0, "data-loading processes per rank; 0: load in the rank itself", most=1024
    )

    global_batch_size: int = setting(256, "samples per step over all ranks", least=1)
    batch_policy: str = setting(
        "global",
        "global: divide --global-batch-size among the ranks; paper: each rank takes "
        "round(--batch-size x score), so the global batch grows with the devices",
        ("global", "paper"),
    )
    batch_size: int = setting(
        64, "samples per step of the fastest rank, with --batch-policy paper", least=1
    )
    balance: str = setting(
        "adaptive",
        "adaptive: benchmark the ranks, size their batches for the shortest step, and adjust "
        "while training; static: benchmark only; off: equal batches, no benchmark",
        ("adaptive", "static", "off"),
    )
    benchmark_seconds: float = setting(
        10.0, "time limit of the benchmark, in seconds", least=ABOVE_ZERO
    )
    benchmark_cache: str = setting(
        "",
        "folder in which benchmark results are cached, by host, device, model and versions",
        metavar="DIR",
    )
    micro_batch_size: int = setting(
        0,
        "most samples per forward and backward pass of a rank; larger batches accumulate "
        "gradients; 0: as many as fit in memory",
    )
    keep_all: bool = setting(
        False, "train on every rank, even if excluding slow ranks would make the job faster"
    )

    layout: str = setting(
        "replicate",
        "replicate: every rank has all of the optimizer's state and of the gradients; shard: each "
        "rank has a part in proportion to its free memory, whatever its batches are; pipeline: "
        "each rank has, and computes, consecutive layers; experts: each rank has, and computes, "
        "some of the experts of kaitian_mpi.Experts, and all else; auto: the fastest that fits, "
        "measured",
        ("replicate", "shard", "pipeline", "experts", "auto"),
    )
    mirrors: bool = setting(
        True,
        "with --layout shard or experts and fault tolerance: keep each rank's part on another one, "
        "too, if there is memory, so that a lost rank costs no step",
    )
    expert_chunks: str = setting(
        "auto",
        "with --layout experts: the number of chunks in which tokens are sent to the ranks of "
        "their experts, from 1; auto: the fastest, measured at startup",
        metavar="auto|N",
    )
    allreduce: str = setting(
        "auto",
        "algorithm for gradients that cross device kinds; auto: the fastest, measured at startup",
        ("auto", "flat", "leader", "striped"),
    )
    network_allreduce: str = setting(
        "auto",
        "algorithm for tensors in host memory between hosts; auto: the fastest, measured at "
        "startup; mpi: MPI's own allreduce",
        ("auto", "mpi", "pairwise", "ring"),
    )
    relay_dtype: str = setting(
        "fp32",
        "format of fp32 gradients between device kinds; bf16 halves the bytes; sums stay fp32",
        ("fp32", "bf16"),
    )
    relay_memory_mb: int = setting(
        32,
        "host memory for buffers between an accelerator and MPI, per process group, in MB",
        least=1,
    )
    wire: str = setting(
        "fp32",
        "gradient format between hosts: fp32, or fewer bits for slow links; the rounding error is "
        "added to the next step's gradients",
        ("fp32", "bf16", "int8", "int4"),
    )
    emulate_slowdown: str = setting(
        "",
        "slow ranks down by sleeping: rank:factor or rank:factor@step, such as "
        "2:3.0,3:3@50,3:1@90 (results are marked 'emulated'; default $KAITIAN_EMULATE_SLOWDOWN)",
        metavar="LIST",
    )

    emulate_memory: str = setting(
        "",
        "limit what ranks can allocate beyond their memory use at startup: rank:size, such as "
        "1:600MB,2:300MB (results are marked 'emulated'; default $KAITIAN_EMULATE_MEMORY)",
        metavar="LIST",
    )

    parity: bool = setting(
        True,
        "before training, compare forward and backward of a few samples across device kinds, if "
        "there are several; the job ends if a kind differs by more than rounding",
    )

    epochs: int = setting(10, "passes over the training set; 0: no limit besides --max-steps")
    max_steps: int = setting(0, "stop after this many steps; 0: no limit besides --epochs")
    precision: str = setting(
        "fp32",
        "precision of forward and backward; weights and gradient sums stay fp32; auto: the "
        "faster of fp32 and bf16 on each rank",
        ("fp32", "bf16", "fp16", "auto"),
    )
    memory_format: str = setting(
        "contiguous",
        "memory format of images; auto: the faster one on each rank",
        ("auto", "contiguous", "channels_last"),
    )
    sync_bn: bool = setting(
        False,
        "batch norm uses the statistics of the global batch, not those of each rank's own "
        "samples; each rank then computes its share in one pass, without micro-batches",
    )
    max_bad_steps: int = setting(
        20, "end the run after this many consecutive steps with NaN or Inf gradients; 0: never"
    )
    check_every: int = setting(
        200, "steps between comparisons of the ranks' weights; 0: only after a rank is lost"
    )

    resume: str = setting(
        "",
        "auto: resume from the newest valid checkpoint in --run-dir, or start from scratch if "
        "there is none; or a checkpoint's .pt file",
        metavar="auto|FILE",
    )
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: use --checkpoint-minutes")
    checkpoint_minutes: float = setting(
        10.0, "minutes between checkpoints; 0: only by --checkpoint-every and after each epoch"
    )
    checkpoint_copy_mb: int = setting(
        1024,
        "a state of up to this many MB is copied in memory, and written while training goes on; a "
        "larger one is written without a copy, and training waits",
    )
    keep_checkpoints: int = setting(3, "number of checkpoints to keep, besides the best", least=1)
    spares: int = setting(
        0, "number of spare ranks: the last ones stand by, each ready to replace a lost rank"
    )
    step_timeout: float = setting(
        0.0,
        "seconds after which a rank that hangs is killed; 0: 20 times the median step, at least 60",
    )
    snapshots: str = setting(
        "",
        "keep the state in each host's memory (/dev/shm) under this name, to restart from when a "
        "host is lost; kaitian-supervise sets this itself",
    )
    snapshot_every: int = setting(10, "steps between the snapshots of --snapshots", least=1)

    seed: int = setting(
        0, "seed of weights, sample order, augmentation and dropout", most=2**48 - 1
    )
    run_dir: str = setting("", "folder for results; without it, nothing is written", metavar="DIR")
    export: str = setting(
        "",
        "write the weights of the finished run to this .safetensors file as well (needs the extra "
        "'export')",
        metavar="FILE",
    )
    log_interval: float = setting(2.0, "seconds between progress lines")
    progress: str = setting(
        "plain",
        "plain: a line every --log-interval; live: bars, figures and a row for each rank, at the "
        "bottom of the terminal",
        ("plain", "live", "none"),
    )
    quiet: bool = setting(False, "print only warnings, errors, and the summary at the end of a run")
    timeline: bool = setting(
        False,
        "record every rank's phases and collectives in the run folder's timeline.json, for "
        "https://ui.perfetto.dev or chrome://tracing",
    )
    timeline_every: int = setting(
        0,
        "with --timeline: record every Nth step; 0: the first 10 and every 10th, and fewer in "
        "runs of thousands of steps",
    )
    tensorboard: bool = setting(
        False, "write TensorBoard's files to the run folder (needs the extra 'tensorboard')"
    )
    wandb: str = setting(
        "",
        "log to this project of Weights & Biases; with WANDB_MODE=offline it stays in the run "
        "folder (needs the extra 'wandb')",
        metavar="[ENTITY/]PROJECT",
    )
    mlflow: str = setting(
        "",
        "log to this experiment of MLflow, at $MLFLOW_TRACKING_URI or else in ./mlruns (needs the "
        "extra 'mlflow')",
        metavar="EXPERIMENT",
    )

    def __post_init__(self) -> None:
        for name in PATHS:  # a shell does not expand the tilde of --flag=~/folder
            if isinstance(given := getattr(self, name, None), str | os.PathLike):
                object.__setattr__(self, name, os.path.expanduser(os.fspath(given)))
        if type(self.expert_chunks) is int:  # a script gives the number itself
            object.__setattr__(self, "expert_chunks", str(self.expert_chunks))
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
                value = value.item()  # a number of numpy's is one
                object.__setattr__(self, field.name, value)
            if choices and value not in choices:
                raise out_of_range(field.name, value, f"one of {', '.join(choices)}")
            if needed := wrong_type(field, value) or outside(field, value):
                raise out_of_range(field.name, value, needed)
        self._check_names()

    def _check_names(self) -> None:
        if self.sync_bn and self.micro_batch_size:
            raise UserError(
                "--sync-bn cannot be combined with --micro-batch-size, since its statistics are "
                "those of a whole step; remove one of them"
            )
        if not (self.epochs or self.max_steps):
            raise UserError("--epochs 0 requires --max-steps, the steps after which training ends")
        self.check_layout(self.layout)
        chunks = self.expert_chunks
        if chunks != "auto" and not (chunks.isdecimal() and 1 <= int(chunks) <= MAX_EXPERT_CHUNKS):
            raise out_of_range(
                "expert_chunks", chunks, f"auto or a whole number, from 1 to {MAX_EXPERT_CHUNKS}"
            )
        if chunks != "auto" and self.layout not in ("experts", "auto"):
            raise UserError(
                f"--expert-chunks requires --layout experts, not {self.layout}; remove one of them"
            )
        if self.snapshots and not self.snapshots.isalnum():
            raise out_of_range("snapshots", self.snapshots, "letters and digits")
        for name in ("tensorboard", "wandb", "mlflow", "timeline"):
            if getattr(self, name) and self.choose_folder() is None:
                raise UserError(f"{flag_name(name)} requires --run-dir, where it is kept")
        if self.wandb and not re.fullmatch(r"([\w.-]+/)?[^/\\#?%:\s]{1,128}", self.wandb):
            raise out_of_range(
                "wandb", self.wandb, r"a project's name without / \ # ? % : or spaces"
            )
        if self.resume == "auto" and not self.run_dir:
            raise UserError("--resume auto requires --run-dir, the folder of the run to resume")
        if self.timeline_every and not self.timeline:
            raise UserError("--timeline-every requires --timeline")
        if self.export and Path(self.export).suffix != ".safetensors":
            raise out_of_range(
                "export",
                self.export,
                "a file named *.safetensors",
                "the run folder has the weights as torch.save writes them, in checkpoints/model.pt",
            )

    def check_layout(self, layout: str) -> None:
        """Raise a `UserError` if other settings rule a layout out; `auto` then takes another."""
        for name in ("wire", "relay_dtype") if layout in _EXACT else ():
            if getattr(self, name) != "fp32":
                raise UserError(
                    f"{flag_name(name)} cannot be combined with --layout {layout}, whose sums are "
                    "exact; remove one of them"
                )
        if self.sync_bn and layout in ("pipeline", "experts"):
            why = {
                "pipeline": "in which each micro-batch has statistics of its own",
                "experts": "in which the loss is weighted before backward",
            }
            raise UserError(
                f"--sync-bn cannot be combined with --layout {layout}, {why[layout]}; remove one "
                "of them"
            )

    @property
    def may_divide_state(self) -> bool:
        """Whether it may be that no rank has the whole state, and its memory is planned."""
        return self.layout != "replicate"

    def choose_folder(self) -> Path | None:
        """Return the folder for results; None if nothing is to be written."""
        return Path(self.run_dir) if self.run_dir else None

    def spell(self, **settings: str) -> str:
        """Return the text by which a script gives some settings: arguments of `Training`."""
        return ", ".join(f'{name}="{value}"' for name, value in settings.items())

    def word(self, text: str) -> str:
        """Return a message that names flags as it names settings to the user of this config."""
        return _with_setting_names(text)

    @property
    def has_trackers(self) -> bool:
        """Whether other programs receive the metrics."""
        return bool(self.tensorboard or self.wandb or self.mlflow)

    def shared_values(self) -> dict[str, str]:
        """Return the settings that must be the same on every rank, as texts by flag.

        Of a path, which may be another one on each host, only whether it is given.
        """
        table = getattr(self, "set", {})
        values = {name: value for name, value in vars(self).items() if name not in MAY_DIFFER}
        named = {flag_name(name): _text(value, name in PATHS) for name, value in values.items()}
        named |= {
            f"--set {key}": _text(value, os.sep in str(value)) for key, value in table.items()
        }
        return named | {"--set": ", ".join(sorted(table)) or "not given"}


def make_config(config: TrainingConfig | None, settings: dict[str, Any]) -> TrainingConfig:
    """Return the settings of a script: a config, with some changed by name."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(TrainingConfig)
    }
    for name in settings.keys() - defaults.keys():
        raise UserError(f"Training has no setting {name!r}; it has {', '.join(sorted(defaults))}")
    changed = {name: defaults[name] if value is None else value for name, value in settings.items()}
    if config is not None and not isinstance(config, TrainingConfig):
        raise UserError(
            f"Training: config is a {type(config).__name__} and must be a TrainingConfig; give "
            "settings by name, such as Training(task, epochs=3)"
        )
    try:
        if config is None:
            check_given(changed)
            return TrainingConfig(**changed)
        return dataclasses.replace(config, **changed)
    except UserError as error:  # a script has settings by name, and no flags
        raise UserError(_with_setting_names(str(error))) from None


def check_given(settings: Mapping[str, Any]) -> None:
    """Raise a `UserError` if one of the settings that the user gives has no effect."""
    if "batch_size" in settings and settings.get("batch_policy") != "paper":
        raise UserError(
            "--batch-size has an effect with --batch-policy paper only; give --global-batch-size, "
            "the samples per step over all ranks"
        )


def _with_setting_names(text: str) -> str:
    """Return a message with settings, as a script gives them, in the place of flags."""
    names = {field.name for field in dataclasses.fields(TrainingConfig)}

    def spell(flag: re.Match[str]) -> str:
        name = flag["name"].replace("-", "_")
        value = f'="{flag["value"]}"' if flag["value"] else ""
        if name.startswith("no_") and name not in names:
            name = name.removeprefix("no_")
            value = "=False"
        return name + value if name in names else flag[0]

    return re.sub(_FLAG, spell, text)


def _text(value: object, is_path: bool) -> str:
    if value == "":
        return "not given"
    return "a path" if is_path and value != "auto" else str(value)
