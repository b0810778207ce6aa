"""Each command in a block of README and docs: which tests take its way, or why none can."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:mpirun|kaitian-\w+|python3?|pip|bin/\w+|torchrun|accelerate|source|"
    r"export|git|ssh[\w-]*|sbatch|qsub|docker|kubectl|apptainer|tensorboard|mkdir|ln|~/\S+|"
    r"pytest|py-spy|pgrep|jupyter|gdb) "
)
# The first pattern that is found in a command counts. Tests run it shorter, with other values.
TAKEN_BY = {
    r"^sbatch|^qsub": "e2e/test_slurm.py",
    r"^kaitian-env|^kaitian-supervise|hosts\.txt|hostfiles/": "e2e/test_hosts.py "
    "e2e/test_host_starts.py e2e/test_launch_by_command.py e2e/test_doctor.py",
    r"lerobot|--adaptive": "e2e/test_adaptive.py",
    r"examples/large_gpt": "e2e/test_large_models.py",
    r"examples/(train_before|own_loop)|python train\.py": "e2e/test_own_training.py",
    r"examples[/.](?!own_data)": "e2e/test_scripts.py",
    r"^bin/demo": "e2e/test_demo.py",
    r"KAITIAN_TORCH": "unit/test_versions.py e2e/test_two_pythons.py",
    r"kaitian-plan --memory": "e2e/test_memory_estimate.py",
    r"kaitian-plan": "e2e/test_balance.py unit/test_plan_command.py",
    r"kaitian-report": "unit/test_report_command.py",
    r"kaitian-doctor": "e2e/test_doctor.py",
    r"kaitian-run|script\.py": "e2e/test_run.py e2e/test_scripts.py",
    r"--dataset imagefolder|examples\.own_data": "unit/test_image_folder.py unit/test_own_data.py",
    r"--spares|--with-ft ulfm|--resume|--run-dir runs/(a|first|stop)": "e2e/test_survival.py "
    "e2e/test_saving.py e2e/test_recovery.py",
    r"--init|--export": "unit/test_weight_files.py e2e/test_train.py",
    r"--config|--set|--task": "unit/test_flag_values.py e2e/test_train.py",
    r"--tensorboard": "unit/test_metrics_programs.py",
    r"--sync-bn": "batch_norms.py",
    r"--devices (cuda|acme)": "vendor e2e/test_vendor.py",
    r"^(mpirun -np \d+ )?kaitian-train ": "e2e/test_train.py e2e/test_launch_by_command.py",
}
CANNOT = {
    r"^(git|pip|python3 -m venv|source|export|mkdir|ln|~/\S+)": "changes the machine",
    r"torchvision": "downloads",
    r"^ssh": "logs in to a second machine",
    r"^(docker|kubectl|apptainer)|apptainer exec": "needs that program, and a cluster",
    r"^(torchrun|accelerate)": "is another launcher's",
    r"^tensorboard": "serves until it is interrupted",
    r"^bin/test": "is all tests",
    r"^(py-spy|pgrep|gdb)|pdb|xterm": "needs a terminal, or a job that runs",
}


def documented_commands():
    """Return the lines of the pages' blocks that start a program."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for block in (text for language, text in blocks if language in ("", "bash")):
            lines = [re.sub(r"\s+# .*", "", line).removeprefix("!") for line in block.splitlines()]
            found += [line for line in lines if PROGRAM.match(f"{line} ")]
    return list(dict.fromkeys(found))


def first_of(table, command):
    return next((pattern for pattern in table if re.search(pattern, command)), None)


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_command_is_taken_by_tests_or_marked(command):
    if first_of(CANNOT, command) is None:
        assert first_of(TAKEN_BY, command), (
            f"name the tests that run it, or why none can: {command}"
        )


def test_the_tables_name_tests_that_exist_and_nothing_else():
    commands = documented_commands()
    assert len(commands) > 90
    used = {first_of(CANNOT, command) or first_of(TAKEN_BY, command) for command in commands}
    assert [each for each in [*CANNOT, *TAKEN_BY] if each not in used] == []
    for tests in TAKEN_BY.values():
        assert all((ROOT / "tests" / name).exists() for name in tests.split()), tests
