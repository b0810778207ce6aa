"""`kaitian-train` on fake accelerators of another package, beside the CPU."""

import json
from pathlib import Path

import pytest
from torch.utils import backend_registration

OTHER_PACKAGE = Path(__file__).parents[1] / "vendor"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot have a device type in Python",
)
def test_train_with_kinds_and_a_vendor_library_of_another_package(mpirun, tmp_path):
    broken = tmp_path / "packages" / "broken-1.0.dist-info"  # never requested here
    broken.mkdir(parents=True)
    (broken / "entry_points.txt").write_text("[kaitian_mpi.devices]\nbroken = no_module:Device\n")
    ended = mpirun(
        3,
        *"kaitian-train --devices vendor:0,cpu,vendor:1 --model cnn --allreduce leader".split(),
        *"--epochs 2 --check-every 2 --keep-all --benchmark-seconds 2 --run-dir run".split(),
        *"--relay-dtype bf16 --sync-bn".split(),
        PYTHONPATH=f"{OTHER_PACKAGE}:{broken.parent}",
    )
    assert ended.code == 0, ended.text
    assert "broken" not in ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["device_kinds"] == ["vendor", "cpu"]
    assert not summary["emulated"]
    assert summary["relay"] == {"memory_mb": 32, "dtype": "bf16", "device_aware": False}
    assert summary["val_accuracy"] > 0.2  # chance gives 0.1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sync_bn"]
