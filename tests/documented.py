"""The commands in the blocks of README and docs: which of them tests run as they are printed."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:mpirun|kaitian-\w+|python3?|pip|bin/\w+|torchrun|accelerate|source|"
    r"export|git|ssh[\w-]*|sbatch|qsub|docker|kubectl|apptainer|tensorboard|mkdir|ln|~/\S+|"
    r"pytest|py-spy|pgrep|jupyter|gdb) "
)
# In each table, the first pattern that is found in a command counts.
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
RUN_BY_OTHERS = {
    r"^sbatch|^qsub": "e2e/test_slurm.py",
    r"^kaitian-env|^kaitian-supervise|hosts\.txt|hostfiles/": "e2e/test_hosts.py "
    "e2e/test_host_starts.py e2e/test_launch_by_command.py e2e/test_doctor.py",
    r"lerobot": "e2e/test_adaptive.py",
    r"examples/large_gpt": "e2e/test_large_models.py",
    r"python train\.py": "e2e/test_own_training.py",
    r"^bin/demo": "e2e/test_demo.py",
    r"KAITIAN_TORCH": "unit/test_versions.py e2e/test_two_pythons.py",
    r"--devices (cuda|acme)": "vendor e2e/test_vendor.py",
    r"--watch": "unit/test_report_command.py",
}
"""Of commands that need several hosts, another device or minutes: tests that run them shorter."""


def documented_commands() -> dict[str, str]:
    """Return the lines of the pages' blocks that start a program, each with the page's name."""
    commands: dict[str, str] = {}
    for page in PAGES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for block in (text for language, text in blocks if language in ("", "bash")):
            for line in block.splitlines():
                command = re.sub(r"\s+# .*", "", line).removeprefix("!")
                if _PROGRAM.match(f"{command} "):
                    commands.setdefault(command, page.stem)
    return commands


def pattern_of(command: str) -> str | None:
    """Return the pattern of a command that no test runs as it is printed; None for others."""
    patterns = (*CANNOT, *RUN_BY_OTHERS)
    return next((pattern for pattern in patterns if re.search(pattern, command)), None)
