"""`kaitian-train` on fake accelerators with a collective library, beside the CPU."""

import json
from pathlib import Path

import pytest
from jobs import PYTHON
from torch.utils import backend_registration

SCRIPT = Path(__file__).parents[1] / "vendor" / "train.py"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot have a device type in Python",
)
def test_training_with_a_vendors_library_beside_the_cpu(mpirun, tmp_path):
    ended = mpirun(
        3,
        *(PYTHON, SCRIPT, "--devices", "vendor:0,cpu,vendor:1", "--model", "cnn"),
        *"--epochs 2 --check-every 2 --keep-all --benchmark-seconds 2 --run-dir run".split(),
        *"--allreduce leader".split(),
    )
    assert ended.code == 0, ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["device_kinds"] == ["vendor", "cpu"]
    assert not summary["emulated"]
    assert summary["val_accuracy"] > 0.2  # of a tenth by chance
