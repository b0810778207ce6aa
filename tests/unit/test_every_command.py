"""What holds for each command: its help, its version, and what it says about a mistyped flag."""

import os
import subprocess
import sys

import pytest
from choices import by_default

from kaitian_mpi import __version__
from kaitian_mpi.cli import doctor, env, plan, report, run, supervise, train
from kaitian_mpi.cli.flags import make_parser
from kaitian_mpi.errors import UserError

COMMANDS = (doctor, env, plan, report, run, supervise, train)


def parser_of(command):
    return make_parser(command.PROGRAM) if command is train else command.make_parser()


def run_main(command, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [command.PROGRAM, *words])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.PROGRAM)
def test_each_command_has_a_version_and_a_help_for_80_columns(command, monkeypatch, capfd):
    assert run_main(command, monkeypatch, "--version") == 0
    assert capfd.readouterr().out == f"{command.PROGRAM} {__version__}\n"
    monkeypatch.setenv("COLUMNS", "80")
    assert run_main(command, monkeypatch, "--help") == 0
    text = capfd.readouterr().out
    assert "--version" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("command", "words", "meant"),
    [
        (train, "--modle cnn", "--model"),
        (train, "--global-batchsize=3", "--global-batch-size"),
        (train, "--check-evry 3", "--check-every"),
        (run, "--adaptiv train.py", "--adaptive"),
        (plan, "--wrold 2xgpu", "--world"),
        (report, "runs --wach", "--watch"),
        (supervise, "--max-restart 3 mpirun kaitian-train", "--max-restarts"),
        (doctor, "--jsn", "--json"),
        (train, "--nothing-like-it", ""),
    ],
)
def test_a_mistyped_flag_gets_the_one_that_was_meant(command, words, meant):
    parse = supervise.read_options if command is supervise else parser_of(command).parse_args
    with pytest.raises(UserError) as refused:
        parse(words.split())
    hint = f"; did you mean {meant}?" if meant else ""
    assert str(refused.value).endswith(f"{hint}; see {command.PROGRAM} --help")
    assert ("did you mean" in str(refused.value)) == bool(meant)


def test_kaitian_env_prints_what_is_wrong_with_its_file(monkeypatch, capfd, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('[node]\npython = "python3"\n')
    for words in ([str(path), "--print"], ["--print", str(path)]):
        assert run_main(env, monkeypatch, *words) == 2
        assert "[node] must have the full path of its interpreter" in capfd.readouterr().err
    path.write_text(f'[localhost]\npython = "{sys.executable}"\n')
    command = "mpirun -np 1 --host localhost:1 kaitian-train".split()
    assert run_main(env, monkeypatch, str(path), "--print", *command) == 0
    assert "-m kaitian_mpi.cli.train" in capfd.readouterr().out


@pytest.mark.parametrize(
    "command", by_default(COMMANDS, (env, train)), ids=lambda command: command.PROGRAM
)
def test_a_shell_completes_flags(command, tmp_path):
    pytest.importorskip("argcomplete")
    line = f"{command.PROGRAM} --ver"
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": " ",
    }
    env = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    words = [sys.executable, "-m", f"kaitian_mpi.cli.{command.__name__.rpartition('.')[2]}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("", "")
    assert answer.read_text().split() == ["--version"]
