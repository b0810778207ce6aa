"""Mistakes on the command lines of the commands that need no MPI: one line, and exit code 2."""

import sys

import pytest
from test_plan_command import MEASURED
from unit.report_runs import make_run

from kaitian_mpi.cli import plan, report, supervise
from kaitian_mpi.observe.files import save_json

WORLDS = "gpu", "2gpu", "0xgpu", "2xgpu,", "٣xgpu", "9999999999xgpu", "2xgpu,3xgpu"
MISTAKES = {
    plan: [
        *((f"--world={world}", "write it like 8xcuda,32xcpu") for world in ("", *WORLDS)),
        ("--world 90000xgpu,10001xmlu", "write it like 8xcuda,32xcpu"),
        ("--world 2xnpu", "kind 'npu' was not measured, only gpu, mlu"),
        ("--global-batch-size 0", "must be a whole number, at least 1"),
        ("--global-batch-size x", "invalid int value: 'x'"),
        ("--model cnn", "--model cannot be combined with"),
        ("--set check_every=3", "--check-every cannot be combined with"),
        ("--save again.json", "--save cannot be combined with"),
        ("--wrold 2xgpu", "unrecognized arguments: --wrold"),
    ],
    report: [
        ("{tmp}", "not the folder of a run"),
        ("{tmp}/none", "no such folder"),
        ("{run} -o {tmp}/none/x.html", "(No such file or directory); name another"),
        ("{run} -o {tmp}", "Is a directory"),
        ("{run} --images {run}/config.json", "--images"),
        ("", "RUN_DIR"),
    ],
    supervise: [
        ("mpirun -np 2 python x.py", "the command must start kaitian-train"),
        ("mpirun kaitian-train --epochs 0", "--epochs must be a whole number"),
        ("mpirun kaitian-train --wrong", "unrecognized arguments: --wrong; see kaitian-train"),
        ("mpirun --hostfile no kaitian-train", "no is not a regular file"),
        ("mpirun --host a,-oX kaitian-train", "--host: '-oX' is not a host name"),
        ("--max-restarts -1 mpirun kaitian-train", "--max-restarts must be at least 0"),
        ("--probe-seconds nan mpirun kaitian-train", "--probe-seconds must be above 0"),
        ("--hang-seconds -1 mpirun kaitian-train", "--hang-seconds must be at least 0"),
        ("--wrong mpirun kaitian-train", "unrecognized arguments: --wrong; see kaitian-supervise"),
    ],
}
CASES = [
    pytest.param(command, *case, id=f"{command.PROGRAM} {case[0]}")
    for command, cases in MISTAKES.items()
    for case in cases
]


@pytest.mark.parametrize(("command", "words", "said"), CASES)
def test_a_mistake_is_one_line_with_code_2(tmp_path, monkeypatch, capfd, command, words, said):
    monkeypatch.setattr(supervise, "configure_logging", lambda *_: None)  # it is the process's
    words = words.format(tmp=tmp_path, run=tmp_path / "run").split()
    if command is plan:
        save_json(tmp_path / "measured.json", MEASURED.to_json())
        words.insert(0, str(tmp_path / "measured.json"))
    elif command is report:
        make_run(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", [command.PROGRAM, *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{command.PROGRAM}: error: ")
    assert said in err
