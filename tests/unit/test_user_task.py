"""`--task module:function`: what it makes, and every way in which it cannot be made."""

import sys

import pytest
import torch
from mistakes import one_line_error

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.user_task import build_task
from kaitian_mpi.train.task import Task

FUNCTIONS = """
import torch
from kaitian_mpi import Task

def task(width=4, loss=lambda model, batch: model(batch).mean(), **more):
    model = torch.nn.Linear(2, width)
    return Task(model=model, data=torch.ones(8, 2), loss=loss,
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **more)

def build(width, *, name="mine"): return task(width, name=name)
def anything(**settings): return task(**settings)
def nothing(): return None
def without_parameters(): return task()
def open_form(): return task(loss=None)
def two_losses(): return task(parity_loss=lambda model, batch: model(batch).mean())
def raises(): raise OSError("no\\nfile")
def wrong(): return Task(model=3, data=[1], optimizer=None)
def positional(width, /): return task(width)
number = 5
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tasks.py").write_text(FUNCTIONS)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    return tmp_path


def build(function, seed=0, **settings):
    return build_task(f"my_tasks:{function}", settings, seed)


def parse(*arguments):
    return parse_config("kaitian-train", arguments)


def test_the_function_gets_the_settings_and_the_seed():
    task = build("build", width=3, name="narrow")
    assert isinstance(task, Task)
    assert (task.model.out_features, task.name) == (3, "narrow")
    assert build("anything", width=5).model.out_features == 5
    first, again, other = (build("task", seed).model.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_function_that_cannot_be_used_is_a_one_line_error():
    for name, settings, message in (
        ("build", {}, r"--set do not fit: missing a required argument: 'width'; it takes width, "),
        ("build", {"width": 1, "nam": 2}, r"argument 'nam'; it takes width, name"),
        ("without_parameters", {"x": 1}, r"argument 'x'; it takes none"),
        ("positional", {"width": 1}, r"the values of --set do not fit: .*'width'"),
        ("nothing", {}, r"the function returned a NoneType; it must return a kaitian_mpi"),
        ("open_form", {}, r"the Task has no loss; give Task\(loss=\.\.\.\)"),
        ("two_losses", {}, r"Task: leave out parity_loss"),
        ("raises", {}, r"--task my_tasks:raises: raised OSError: no file; --log-level"),
        ("wrong", {}, r"Task: model must be a torch.nn.Module, not a int"),
        ("number", {}, r"is an object of type int; name a function"),
        ("absent", {}, r"module my_tasks has no attribute 'absent'"),
    ):
        with one_line_error(message):
            build(name, **settings)


def test_settings_are_read_as_toml_or_else_as_text():
    dates = {"2024-01-01": "2024-01-01", "[2024-01-01]": "[2024-01-01]"}  # not for config.json
    values = {"3": 3, "3e-4": 3e-4, "true": True, '"3"': "3", "[1, 2]": [1, 2], "": ""}
    texts = {"adam": "adam", "a=b": "a=b", "1\nlr = 2": "1\nlr = 2"}
    for text, value in (values | texts | dates).items():
        config = parse("--task", "a:b", "--set", f"key={text}", "--set", "other=1")
        assert config.set == {"key": value, "other": 1}
        assert type(config.set["key"]) is type(value)
    with pytest.raises(UserError, match=r"--set width is ambiguous.* set\.width = \.\.\."):
        build_task("my_tasks:build", {"width": 3}, 0, ["width"])  # a setting, and an argument


def test_a_task_names_the_run_folder_and_keeps_the_layout_of_its_tensors_unless_asked():
    config = parse("--task", "package.module:build")
    assert config.choose_folder().name.startswith("package.module-build-2")
    assert config.memory_format == "contiguous"
    for words in (["--task", "a:b", "--memory-format", "auto"], []):
        assert parse(*words).memory_format == "auto"
