"""All settings of a training run.

Each field is a setting of `Training` or a flag of `kaitian-train` by the same name
(`global_batch_size` is `--global-batch-size`); its help text is its documentation. Nothing here
imports torch or MPI, so that a wrong flag is reported before either is loaded.
"""

from kaitian_mpi.config.kaitian_train import OF_IMAGES, TrainConfig
from kaitian_mpi.config.training import TrainingConfig
from kaitian_mpi.config.values import LOG_LEVELS, flag_name

__all__ = ["LOG_LEVELS", "OF_IMAGES", "TrainConfig", "TrainingConfig", "flag_name"]
