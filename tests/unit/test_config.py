import dataclasses
import re

import numpy
import pytest
from mistakes import one_line_error

from kaitian_mpi.cli.flags import HIDDEN, SECTIONS, make_parser, parse_config
from kaitian_mpi.config import TrainConfig, TrainingConfig, flag_name
from kaitian_mpi.errors import UserError


def test_errors_in_arguments_and_files_are_one_line_that_names_them(tmp_path):
    for arguments, message in (
        ("--no-such", "unrecognized arguments: --no-such; see kaitian-train --help"),
        ("--mod cnn", "unrecognized arguments: --mod"),
        ("--epochs x", "--epochs: invalid int value: 'x'"),
        ("--epochs=-1", "--epochs must be a whole number, at least 0 and at most 1e9, not -1"),
        ("--epochs 0", "--epochs 0 requires --max-steps, the steps after which training ends"),
        ("--lr 0", "--lr must be a number, above 0"),
        ("--lr nan", "--lr must be .*, not nan"),
        ("--warmup 1", "--warmup must be a number, at least 0 and below 1"),
        ("--val-split 1", "--val-split must be a number, above 0 and below 1"),
        ("--weight-decay -1", "--weight-decay must be .*, not -1.0"),
        ("--allreduce ring", "--allreduce: invalid choice: 'ring'"),
        ("--optimizer adam", "--optimizer: invalid choice: 'adam'"),
        ("--optimizer adamw --momentum 0.5 --no-nesterov", "--momentum, --nesterov cannot be comb"),
        ("--momentum 0", "--nesterov requires --momentum above 0"),
        ("--model nosuch", "--model: there is no model 'nosuch'; give mobilenetv2, resnet18,"),
        ("--dataset nosuch", "--dataset: there is no dataset 'nosuch'; give digits, cifar10"),
        ("--set check_evry=1", r"--set check_evry: there is no such setting; .*check-every\?"),
        ("--set x=1", "there is no such setting; an argument of your own function requires"),
        ("--set check_every=x", "--check-every must be a whole number, not 'x'"),
        ("--set check_every=1 --check-every 2", "--check-every set the same"),
        ("--set task=a:b", "--set task: there is no such setting"),
        ("--task a:b --model cnn", "--model cannot be combined with --task"),
        ("--task a:b --dataset mnist --lr 1 --no-nesterov", "--dataset, --lr, --nesterov cannot"),
        ("--task a:b --set x", "--set 'x' is not name=value; write it like --set lr=3e-4"),
        ("--task a:b --set =1", "--set '=1' is not name=value"),
        ("--task a:b --set x-y=1", "--set x-y: there is no such setting"),
        ("--task a:b --set bias=False", "bias=False: values are read as TOML; write true or false"),
        *((f"--wandb={name}", "--wandb must be") for name in ("a/b/c", "/b", "a/", "what?")),
        *(
            (f"--export {name}", rf"must be .* \*\.safetensors, not '{name}'")
            for name in ("model.pt", "model", "safetensors", ".safetensors", "a.bin")
        ),
        *(
            (f"--expert-chunks={text}", "--expert-chunks must be auto or a whole number, from 1 to")
            for text in ("0", "-1", "1.5", "65", "many")
        ),
        ("--expert-chunks 4", "--expert-chunks requires --layout experts, not replicate"),
        ("--layout experts --wire int8", "--wire cannot be combined with --layout experts, whose"),
        ("--timeline-every 5", "--timeline-every requires --timeline"),
        ("--timeline --timeline-every=-1", "must be .*, not -1"),
    ):
        with one_line_error(message):
            parse_config("kaitian-train", arguments.split())
    for content, message in (
        ("learning-rate = 1", r"run.toml: there is no setting 'learning-rate'; write a flag of"),
        ("epoch = 1", r"no setting 'epoch'; did you mean epochs\?"),
        ("globl-batch-size = 1", r"did you mean global-batch-size\?"),
        ("config = 'other.toml'", r"no setting 'config'"),
        ("epochs = 1.5", r"--epochs must be a whole number, not 1\.5"),
        ("epochs = '1'", r"--epochs must be a whole number, not '1'"),
        ("model = 3", r"--model must be a string, not 3"),
        ("nesterov = 1", r"--nesterov must be true or false, not 1"),
        ("epochs = -1", r"--epochs must be a whole number, at least 0"),
        ("max-steps = 1\nmax_steps = 2", r"max_steps is set twice"),
        ("lr = ", r"is not valid TOML \(Invalid value"),
        ("task = 'a:b'\nlr = 1.0", r"--lr cannot be combined with --task"),
        ("set = 3", r"run.toml: .set. must be a table of arguments, not 3"),
        ("task = 'a:b'\nset = {day = 2024-01-01}", r"set: day is a date or time"),
        ("task = 'a:b'\nset = {x-y = 1}", r"set: 'x-y' cannot be the name of an argument"),
    ):
        with one_line_error(message):
            parse_file(tmp_path, content)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (("no", "No such file"), (".", "Is a dir"), ("binary", "not valid TOML")):
        with pytest.raises(UserError, match=f"--config .*{message}"):
            parse_config("kaitian-train", [f"--config={tmp_path / name}"])


def test_help_shows_at_most_48_flags_and_the_ten_that_matter_first():
    text = make_parser("kaitian-train").format_help()
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.M)
    assert len(flags) <= 48
    shown = [flag_name(name) for names in SECTIONS.values() for name in names.split()]
    assert flags == ["--help", "--version", "--hostfile", "--no-fault-tolerance", *shown]
    assert shown[:10] == [flag_name(name) for name in SECTIONS["common options"].split()]
    assert not {flag_name(name) for name in HIDDEN} & set(flags)


def test_every_setting_is_reached_by_a_flag_by_set_and_by_a_file_below_the_command_line(tmp_path):
    texts = {"warmup": "0.5", "parity": "false", "group_by": "kind", "snapshots": "12"}
    for name, text in texts.items():
        config = parse_config("kaitian-train", ["--set", f"{name}={text}"])
        assert getattr(config, name) == getattr(parse_file(tmp_path, toml(name, text)), name)
        assert getattr(config, name) != TrainConfig.__dataclass_fields__[name].default
        flag = [f"--no-{name}"] if text == "false" else [f"{flag_name(name)}={text}"]
        assert parse_config("kaitian-train", flag) == config
    assert parse_config("kaitian-train", ["--set", "max-bad-steps=3"]).max_bad_steps == 3
    assert parse_config("kaitian-train", ["--set", "epochs=3"]).epochs == 3
    words = "--task a:b --set check_every=7 --set epochs=3 --set lr=0.5"  # or the function
    config = parse_config("kaitian-train", words.split())
    assert (config.check_every, config.epochs) == (7, 10)
    assert config.set == {"epochs": 3, "lr": 0.5}
    for words, lr in (("--optimizer adamw", 1e-3), ("--optimizer adamw --lr 0.05", 0.05)):
        config = parse_config("kaitian-train", words.split())
        assert (config.lr, config.weight_decay) == (lr, 0.01)  # its own defaults
    content = "lr = 1\nglobal-batch-size = 64\nmax_steps = 5\nnesterov = false\n"
    config = parse_file(tmp_path, content, "--max-steps", "7")
    expected = TrainConfig(lr=1, global_batch_size=64, max_steps=7, nesterov=False)
    assert dataclasses.replace(config, config="") == expected
    # A value on the command line counts although it is the default.
    assert parse_file(tmp_path, content, "--lr", "0.05").lr == 0.05
    content = 'task = "a:b"\nset = {lr = 0.1, layers = 2}\n'  # merged by name
    assert parse_file(tmp_path, content, "--set", "lr=0.2").set == {"lr": 0.2, "layers": 2}
    assert parse_file(tmp_path, content).set == {"lr": 0.1, "layers": 2}


def toml(name, text):
    kind = type(TrainConfig.__dataclass_fields__[name].default)
    return f"{name} = {text!r}" if kind is str else f"{name} = {text}"


def parse_file(tmp_path, content, *arguments):
    (tmp_path / "run.toml").write_text(content)
    return parse_config("kaitian-train", ["--config", str(tmp_path / "run.toml"), *arguments])


def test_a_config_built_in_code_is_validated_and_its_paths_compared_as_given_or_not():
    def of(**settings):
        return TrainConfig(task="a:b", **settings).shared_values()

    assert of(run_dir="/a", set={"files": "/a"}) == of(run_dir="/b", set={"files": "/b"})
    assert of(run_dir="/a") != of()
    assert of(resume="auto", run_dir="/a") != of(resume="/a/1.pt", run_dir="/a")
    assert of(set={"lr": 0.1}) != of(set={"lr": 0.2})
    assert of(set={"lr": 0.1}) != of()
    for settings, message in (
        ({"precision": "fp8"}, r"--precision must be one of fp32, bf16, .*, not 'fp8'"),
        ({"wandb": "a b"}, "--wandb must be a project's name without"),
        ({"epochs": numpy.float64(0.5)}, r"--epochs must be .*, not 0"),
        ({"expert_chunks": 0}, "--expert-chunks must be .*, not '0'"),
    ):
        with pytest.raises(UserError, match=message):
            TrainConfig(**settings)
    four = TrainConfig(layout="experts", expert_chunks=4)
    assert four == dataclasses.replace(four, expert_chunks="4")
    config = TrainConfig(seed=numpy.int64(3), lr=numpy.float32(0.5), nesterov=numpy.bool_(True))
    assert [type(each) for each in (config.seed, config.lr, config.nesterov)] == [int, float, bool]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "timeline"])
def test_what_belongs_to_a_runs_folder_needs_one(name):
    value = {"wandb": "a", "mlflow": "a"}.get(name, True)
    with one_line_error(f"{flag_name(name)} requires --run-dir"):
        TrainingConfig(**{name: value})
    TrainingConfig(**{name: value}, run_dir="somewhere")
    TrainConfig(**{name: value})  # makes a folder by itself
