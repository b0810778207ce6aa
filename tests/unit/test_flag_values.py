"""No value of a flag of any command gives more than one line, or gets through and breaks later.

The cases are made from the parsers, so that a flag that is added is tried as well.
"""

import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from mistakes import one_line_error
from torch import nn

from kaitian_mpi.cli import flags, plan, run_flags, supervise, train
from kaitian_mpi.cli.flags import make_parser, parse_config
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi import exchange
from kaitian_mpi.observe.folders import make_new_folder
from kaitian_mpi.observe.run_folder import check_run_folder, open_run_folder
from kaitian_mpi.train.weight_files import check_export

NUMBERS = [
    *("nan", "inf", "-inf", "-1", "-0.5", "0", "1e400", "1e30", "1e12", "1e-400", "", " ", "x"),
    *("1e3", "0x10", "\u0661", "1,5", "9" * 5000, "-" + "9" * 400),
    *(str(2**48), str(2**64), str(10**12)),
]
MOST = 2.0**48  # the largest value that any flag takes


def supervise_options(arguments):
    return supervise.read_options([*arguments, "mpirun", "kaitian-train"])


def plan_options(arguments):
    if arguments[0].startswith("--global-batch-size"):  # the only one beside a file
        arguments = ["measured.json", *arguments]
    return SimpleNamespace(**plan.read_options(arguments).settings)


COMMANDS = {
    "kaitian-train": (make_parser("kaitian-train"), lambda words: parse_config("train", words)),
    "kaitian-supervise": (supervise.make_parser(), supervise_options),
    "kaitian-plan": (plan.make_parser(), plan_options),
    "kaitian-run": (
        run_flags.make_parser(),
        lambda words: run_flags.make_parser().parse_args([*words, "x"]),
    ),
}
FLAGS = [
    (command, action.option_strings[0], action.dest)
    for command, (parser, _) in COMMANDS.items()
    for action in parser._actions
    if action.type in (int, float)
]


@pytest.fixture(scope="module")
def parsers_made_once():
    """Let a command use one parser for all values: to make it takes longer than to parse."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (flags, plan, run_flags, supervise):
            patch.setattr(module, "make_parser", cache(module.make_parser))
        yield


@pytest.mark.usefixtures("parsers_made_once")
@pytest.mark.parametrize(("command", "flag", "name"), FLAGS)
def test_out_of_range_numbers_are_one_line_errors(command, flag, name):
    accepted = []
    for value in NUMBERS:
        number, fault = None, ""
        try:
            number = getattr(COMMANDS[command][1]([f"{flag}={value}"]), name)
        except UserError as error:
            fault = str(error)
        assert (number is None) == (flag in fault)
        assert "\n" not in fault
        if number is None:
            continue
        assert math.isfinite(number), value
        assert 0 <= number <= MOST, value
        accepted.append(number)
    assert len(accepted) < len(NUMBERS) / 2


def test_seeds_are_limited_to_what_torch_accepts():
    assert parse_config("kaitian-train", [f"--seed={2**48 - 1}"]).seed == 2**48 - 1
    with pytest.raises(UserError, match=r"--seed must be .*, not 281474976710656"):
        parse_config("kaitian-train", [f"--seed={2**48}"])


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("data_dir", "run_dir", "benchmark_cache", "resume"):
        # A shell expands it in `--flag ~/x`, but not in `--flag=~/x`.
        for given, found in (("~/x", "/home/me/x"), ("./~/x", "./~/x")):
            assert getattr(TrainConfig(**{name: given}), name) == found


def test_numbers_may_begin_or_end_with_a_point():
    values = {".1": 0.1, "1.": 1.0, "-.5e-3": -0.5e-3, "1.e2": 100.0, ".": ".", "1.2.3": "1.2.3"}
    for text, value in values.items():
        assert parse_config("train", ["--task=a:b", f"--set=lr={text}"]).set == {"lr": value}


def test_an_empty_value_is_refused_and_one_of_a_file_switched_off(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('resume = "auto"\nrun-dir = "runs/x"')
    for flag in ("--resume", "--run-dir", "--init", "--task", "--devices"):
        with pytest.raises(UserError, match=f"^{flag} has an empty value; give one, or omit it$"):
            parse_config("train", [flag, ""])
    # What the file sets is switched off.
    assert parse_config("train", ["--config", str(file), "--resume", ""]).resume == ""


def check_data_folder(path):
    config = TrainConfig(dataset="cifar10", data_dir=path)
    train.check_before_loading(config, SimpleNamespace(rank=0, size=1))


def check_export_file(path):
    pytest.importorskip("safetensors.torch", reason="needs the extra 'export'")
    check_export(TrainConfig(export=f"{path}.safetensors"), nn.Linear(2, 2), 0)


def begin_run(path):
    def begin(config):
        check_run_folder(config, SimpleNamespace(rank=0, comm=None))
        open_run_folder(config, 0)

    with one_line_error("choose a writable folder with --run-dir"):
        make_new_folder(Path(path) / "below")
    with one_line_error("choose a writable folder"):
        begin(TrainConfig(run_dir=path, resume="auto"))
    begin(TrainConfig(run_dir=path))


CHECKS = {
    "--save": plan.check_can_be_written, "--data-dir": check_data_folder,
    "--export": check_export_file, "--run-dir": begin_run,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "path", "why"),
    [
        ("--data-dir", "file", "Not a directory; name the folder that holds"),
        ("--data-dir", "none", "No such file or directory; name the folder that holds"),
        ("--data-dir", "n" * 300, "File name too long; name the folder"),
        ("--data-dir", "link", "Too many levels of symbolic links; name the folder"),
        ("--save", ".", "Is a directory; name a file"),
        ("--save", "file/result.json", "Not a directory; name a file"),
        ("--save", "nowhere/result.json", "No such file or directory; name a file"),
        ("--save", "n" * 300, "File name too long; name a file"),
        ("--export", "folder", "Is a directory; name a file"),
        ("--export", "nowhere/m", "No such file or directory; name a file in a folder"),
        ("--export", "file/m", "Not a directory; name a file in a folder"),
        ("--export", "m" * 300, "File name too long; name a file"),
        ("--run-dir", "file/run", "Not a directory; choose a writable folder"),
        ("--run-dir", "n" * 300, "File name too long; choose a writable folder"),
        ("--run-dir", "/proc/run", "No such file or directory; choose a writable folder"),
        ("--run-dir", "link", "Too many levels of symbolic links; choose a writable folder"),
    ],
)
def test_a_path_is_checked_before_the_work(tmp_path, monkeypatch, flag, path, why):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "folder.safetensors").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(exchange, "gather_values", lambda comm, value: [value])
    with one_line_error(f"{flag} .*: {why}"):
        CHECKS[flag](str(tmp_path / path))
    for name in ("file", "new"):  # nor does the check leave anything where one can be written
        plan.check_can_be_written(str(tmp_path / name))
    assert (sorted(tmp_path.rglob("*")), (tmp_path / "file").read_text()) == (before, "kept")
