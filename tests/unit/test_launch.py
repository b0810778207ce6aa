"""What mpirun is given: environments, hosts' answers, a launcher's own command."""

import re
import sys
from contextlib import nullcontext

import pytest

from kaitian_mpi import __version__
from kaitian_mpi.cli import env, supervise
from kaitian_mpi.errors import UserError
from kaitian_mpi.preflight.limited_process import Ended
from kaitian_mpi.supervise.environments import Environment, expand, read_environments
from kaitian_mpi.supervise.hosts import Host
from kaitian_mpi.supervise.mpirun_command import parse_launcher
from kaitian_mpi.supervise.remote_hosts import ask_hosts, check_hostfile, read_answer

LIST, MODULE = "--devices cuda:0,cuda:1,rocm:0", "-m kaitian_mpi.cli"
BOTH = [Environment("/c/python", ("cuda:0", "cuda:1")), Environment("/r/python", ("rocm:0",))]
A, B, C = ([Environment(python)] for python in ("/a/python3", "/b/python", "/c/python"))


HOSTS = (Host(name="a", slots=2), Host(name="b", slots=1), Host(name="c", slots=3))
TRAIN = "kaitian_mpi.cli.train --lr 1"


def test_each_environment_of_each_host_is_a_part_of_a_command_that_can_be_divided():
    for line, hosts, environments, words in (
        (
            "mpirun --hostfile hf -np 5 --bind-to none kaitian-train --lr 1",
            *(HOSTS, {"b": B, "c": B}),
            "mpirun --hostfile hf --bind-to none --host a:2 -np 2 kaitian-train --lr 1 : "
            f"--host b:1,c:2 -np 3 /b/python -m {TRAIN}",
        ),
        (
            "nice mpirun -x FOO --wdir /d --host a:2,b:1,c:3 /x/bin/python -u train.py",
            *(HOSTS, {"a": A}),
            "nice mpirun -x FOO --wdir /d --host a:2 -np 2 /a/python3 -u train.py : --wdir /d "
            "--host b:1,c:3 -np 4 /x/bin/python -u train.py",
        ),
        (
            "mpirun -np 2 /opt/bin/kaitian-train --lr 1",  # b and c get no rank
            *(HOSTS, {"b": B}),
            "mpirun --host a:2 -np 2 /opt/bin/kaitian-train --lr 1",
        ),
        (
            "mpirun kaitian-train --lr 1",
            *((), {"localhost": BOTH}),
            f"mpirun --host localhost:2 -np 2 /c/python {MODULE}.train {LIST} --lr 1 : "
            f"--host localhost:1 -np 1 /r/python {MODULE}.train {LIST} --lr 1",
        ),
        (
            "mpirun -np 5 kaitian-run train.py",
            *(HOSTS, {"b": C, "c": BOTH}),
            "mpirun --host a:2 -np 2 kaitian-run train.py : "
            f"--host b:1 -np 1 /c/python {MODULE}.run train.py : "
            f"--host c:2 -np 2 /c/python {MODULE}.run {LIST} train.py",
        ),
    ):
        expanded, used = expand(parse_launcher(line.split()), hosts, environments)
        assert " ".join(expanded) == words
        listed = ",".join(re.findall(r"--host (\S+)", words)).split(",")
        assert {host.name for host in used} == {entry.partition(":")[0] for entry in listed}
    for line, hosts, environments, message in (
        ("mpirun -np 7 kaitian-train", HOSTS, {}, "only 6 slots for 7 ranks"),
        ("mpirun kaitian-train", HOSTS, {"z": A}, "name z, but the hostfile and --host have"),
        ("mpirun kaitian-train", (Host(name="a"),), {}, "no slots are known for a; write slots=N"),
        ("mpirun kaitian-train", (), {}, "no hosts are known; name them in a hostfile, or"),
        ("mpirun kaitian-train", (), {"z": A}, "no slots are known for z; write"),
        ("mpirun ./run.sh", HOSTS, {"a": A}, "interpreter of ./run.sh cannot"),
        ("mpirun", HOSTS, {"a": A}, "interpreter of no program cannot"),
        ("mpirun kaitian-train", HOSTS[:1], {"a": BOTH}, "of a have 3 devices, but it has only 2"),
        ("mpirun python x.py", (), {"a": BOTH}, "the devices of python cannot .* kaitian-"),
    ):
        with pytest.raises(UserError, match=message):
            expand(parse_launcher(line.split()), hosts, environments)


@pytest.mark.parametrize(
    ("program", "is_twice"),
    [
        ("kaitian-train --devices=cpu", True),
        ("kaitian-run --devices cpu ./tool", True),
        ("kaitian-run --log-level info --devices cpu -m tool --devices 2", True),
        ("kaitian-run ./tool --devices 2", False),
        ("kaitian-run --log-level info -m info --devices 2", False),
        ("kaitian-run tool.py -- --devices 2", False),
    ],
)
def test_devices_are_listed_by_a_commands_own_flags_or_by_its_environments(
    tmp_path, monkeypatch, program, is_twice
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "environments.toml"
    words = f"mpirun --host a:1 {program}".split()
    for listed in ("", 'devices = ["cuda:0"]'):
        file.write_text(f'[a]\npython = "/c/python"\n{listed}')
        for prepare in (
            lambda: env.plan(env.read_options(["--print", str(file), *words])),
            lambda: supervise.make_job(words, None, read_environments(str(file))),
        ):
            expected = nullcontext()
            if is_twice and listed:
                expected = pytest.raises(UserError, match=f"both --devices of {words[3]} and")
            with expected:
                prepare()


PATH_ONLY = "must have the full path of its interpreter"


def test_the_environments_of_a_host_are_read_in_order_and_wrong_files_named(tmp_path):
    for text, message in (
        ("[a", "is not valid TOML"),
        ('a = "/bin/python"', PATH_ONLY),
        ("[a]", PATH_ONLY),
        ("a = []", PATH_ONLY),
        ('[a]\npython = "/p"\nPATH = "/x"', "only python and devices can be"),
        ('[a]\npython = "/p"\ndevices = "cpu"', "have a list of devices"),
        ('[a]\npython = "/p"\ndevices = []', "have a list of devices, one for"),
        ('[[a]]\npython = "/p"\n[[a]]\npython = "/q"', "each rank of /p,"),
        ('[b.lab]\npython = "/p"', 'a name with dots: \\["node-b.lab"\\]'),
        ('[a]\npython = "bin/python"', PATH_ONLY),
    ):
        (tmp_path / "hosts.toml").write_text(text)
        with pytest.raises(UserError, match=message):
            read_environments(str(tmp_path / "hosts.toml"))
    (tmp_path / "hosts.toml").write_text(
        '[[a]]\npython = "/c/python"\ndevices = ["cuda:0", "cuda:1"]\n'
        '[[a]]\npython = "/r/python"\ndevices = ["rocm:0"]\n[b]\npython = "/b/python"\n'
    )
    assert read_environments(str(tmp_path / "hosts.toml")) == {"a": tuple(BOTH), "b": tuple(B)}


def test_what_a_host_answers_and_what_mpirun_will_do_with_a_hostfile():
    for ended, answer in (
        (Ended(0, f"Welcome!\n{__version__}\n"), __version__),
        (Ended(0, "9\n"), f"b has kaitian-mpi 9, and this host {__version__}; install the same"),
        (Ended(None), "b does not answer within 8 s; check"),
        (Ended(255, "", "ssh: No route to host\n"), "b cannot be reached (ssh: No route to host);"),
        (Ended(127, "", "bash: /p: No such file or directory"), "b has no /p; install"),
        (Ended(1, "", "x\nimportlib.metadata.PackageNotFoundError: k"), "/p has no kaitian-mpi"),
        (Ended(1, "", "Fatal Python error"), "b: /p fails (Fatal Python error); run it there"),
    ):
        one = read_answer(ended, "b", "/p", 8.0, False)
        assert answer in (one.fault or one.version)
    hosts = [Host(name=name) for name in "abc"]
    pythons = {"a": [sys.executable, "/nowhere/python"], "b": [], "c": ["/proc/version"]}
    answers = ask_hosts(["false"], hosts, pythons, {"a", "b", "c"})
    assert len(answers) == 3
    assert not answers["a", sys.executable].fault
    assert "a has no /nowhere/python" in answers["a", "/nowhere/python"].fault
    assert "c has no /proc/version" in answers["c", "/proc/version"].fault
    for slots, variable, levels in (
        ((2, 1), "", ["ok"]),
        ((2, 1), ":oversubscribe", ["problem", "ok"]),
        ((2,), ":oversubscribe", ["ok"]),
        ((2, None), "", ["warning"]),
    ):
        hosts = tuple(Host(name=f"n{number}", slots=count) for number, count in enumerate(slots))
        environ = {"PRTE_MCA_rmaps_default_mapping_policy": variable}
        assert [str(problem.level) for problem in check_hostfile(hosts, environ)] == levels
