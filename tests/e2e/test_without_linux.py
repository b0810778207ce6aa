"""Jobs on a system that lacks what only Linux has; macOS's other differences are not tested."""

import json
from pathlib import Path

WITHOUT = Path(__file__).parents[1] / "without_linux"


def test_a_job_trains_and_is_examined_without_what_only_linux_has(mpirun, tmp_path):
    command = "kaitian-train --model cnn --max-steps 3 --workers 1 --benchmark-seconds 1"
    words = f"{command} --run-dir run".split()
    ended = mpirun(2, *words, fresh=True, PYTHONPATH=str(WITHOUT))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
    ended = mpirun(1, "kaitian-doctor", "--json", fresh=True, PYTHONPATH=str(WITHOUT))
    assert "not on this system" not in ended.text
