"""The command of a supervised job without some of its hosts."""

from pathlib import Path

import pytest

from kaitian_mpi.cli import supervise
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import parse_slowdown
from kaitian_mpi.supervise.environments import Environment
from kaitian_mpi.supervise.hosts import Host, choose, parse_host_list, parse_hostfile, place_by_slot
from kaitian_mpi.supervise.job_runner import environment
from kaitian_mpi.supervise.mpirun_command import HOST_LISTS, HOSTFILES, parse_command
from kaitian_mpi.supervise.starts import JobCommand, plan_start


def hosts(**slots):
    return [Host(name=name, slots=count) for name, count in slots.items()]


@pytest.mark.parametrize(
    ("hosts", "ranks", "expected"),
    [
        (hosts(a=2, b=1), 3, "aab"),
        (hosts(a=2, b=2), 3, "aab"),
        (hosts(a=2, b=2), 1, "a"),
        (hosts(a=1, b=2), 5, "abbab"),
        (hosts(a=None, b=2), 4, "aaaa"),
        (hosts(a=1, b=None), 4, "abbb"),
        (hosts(a=0, b=1), 2, "bb"),
        (hosts(a=0), 2, ""),
        ([], 2, ""),
    ],
)
def test_ranks_are_placed_by_slot(hosts, ranks, expected):
    assert "".join(place_by_slot(hosts, ranks)) == expected


C = "c slots=1 # new\n"
AB = "a slots=2\nb slots=1\n"
HOSTFILE = "# ours\n" + AB + C


@pytest.mark.parametrize(
    ("options", "lost", "expected", "hostfile", "shape"),
    [
        ("-np 4 --hostfile hf", "", "-np 4 --hostfile hf", "", "4 ranks on a, b, c"),
        ("-np 4 --hostfile hf", "b", "-np 3 --hostfile new", "a slots=2\n" + C, "3 ranks on a, c"),
        ("-np 2 --hostfile=hf", "b", "-np 2 --hostfile=new", "a slots=2\n" + C, "2 ranks on a, c"),
        ("--hostfile hf", "ab", "--hostfile new", C, "1 rank on c"),
        ("--host a:2,b -n 3", "b", "--host a:2 -n 2", "", "2 ranks on a"),
        ("--host a:2 -H b -n 3", "a", "-H b -n 1", "", "1 rank on b"),
        ("--hostfile hf --host c,a", "c", "--hostfile new --host a", AB, "1 rank on a"),
        ("", "", "", "", "as mpirun chooses"),
        ("-np 2", "", "-np 2", "", "2 ranks"),
    ],
)
def test_the_command_of_a_start_excludes_lost_hosts(options, lost, expected, hostfile, shape):
    job = make_job(f"mpirun {options} kaitian-train --lr 1")
    start = plan_start(job, frozenset(lost), False, "new")
    assert start.words == f"mpirun {expected} kaitian-train --lr 1{OWN}".split()
    assert start.hostfile == hostfile
    assert start.shape == shape


def make_job(line, hostfile=HOSTFILE, **settings):
    command = parse_command(line.split())
    files = dict.fromkeys(command.values(HOSTFILES), hostfile)
    lists = ",".join(command.values(HOST_LISTS))
    chosen = parse_host_list(lists) if lists else ()
    hosts = choose(parse_hostfile("\n".join(files.values()), "hf"), chosen)
    config = TrainConfig(run_dir="runs/x", snapshots="beef", **settings)
    folder = Path("runs/x")
    return JobCommand(command=command, hosts=hosts, hostfiles=files, folder=folder, config=config)


OWN = " --run-dir=runs/x --resume=auto"


def flags_of(job, lost, trained=False):
    """Return the start's flags of kaitian-train."""
    words = plan_start(job, frozenset(lost), trained, "new").words
    return words[words.index("kaitian-train") + 1 :]


@pytest.mark.parametrize(
    ("options", "shape", "settings"),
    [("-np 4 ", "4 ranks on b", {}), ("", "b", {"emulate_kinds": "gpu,mlu"})],
)
def test_a_hostfile_without_slots_keeps_the_number_of_ranks(options, shape, settings):
    job = make_job(f"mpirun {options}--hostfile hf kaitian-train", "a\nb\n", **settings)
    start = plan_start(job, frozenset("a"), False, "new")
    assert start.words == f"mpirun {options}--hostfile new kaitian-train{OWN}".split()
    assert start.shape == shape


EMULATED = {"emulate_kinds": "gpu,mlu,mlu,npu", "emulate_slowdown": "2:3,3:2@9"}
TWO_LEFT = "--emulate-kinds=gpu,mlu --emulate-slowdown=0:1"


def test_a_smaller_job_has_the_first_devices_and_fewer_spares():
    for options, lost, settings, flags in (
        ("-np 4", "", EMULATED, ""),
        ("-np 4", "b", EMULATED, "--emulate-kinds=gpu,mlu,mlu --emulate-slowdown=2:3"),
        ("-np 4", "bc", EMULATED, TWO_LEFT),
        ("", "a", EMULATED, TWO_LEFT),
        ("-np 4", "", {"spares": 2}, ""),
        ("-np 4", "b", {"spares": 2}, "--spares=1"),
        ("-np 4", "bc", {"spares": 2}, "--spares=0"),
        ("-np 4", "ac", {"spares": 2}, "--spares=0"),
    ):
        job = make_job(f"mpirun {options} --hostfile hf kaitian-train", **settings)
        assert flags_of(job, lost) == f"{flags}{OWN}".split()


def test_a_smaller_job_has_flags_in_the_place_of_variables(monkeypatch):
    """Variables number the ranks of the whole job; flags take precedence over them."""
    for flags, command, kinds, slowdown in (
        ("", "", "gpu,mlu", "1:3"),
        ("", "-x KAITIAN_EMULATE_SLOWDOWN=2:5", "gpu,mlu", "0:1"),
        ("--emulate-kinds a,b,c,d", "", "a,b", "1:3"),
    ):
        monkeypatch.setenv("KAITIAN_EMULATE_KINDS", "gpu,mlu,mlu,npu")
        monkeypatch.setenv("KAITIAN_EMULATE_SLOWDOWN", "3:2,1:3")
        line = f"mpirun {command} -np 4 --host a:1,b:2,c:1 kaitian-train --run-dir x {flags}"
        job = supervise.make_job(line.split())
        assert not plan_start(job, frozenset(), False, "new").words[-3].startswith("--emulate")
        words = plan_start(job, frozenset("b"), False, "new").words
        added = [word for word in words if word.startswith("--emulate-")][-2:]
        assert added == [f"--emulate-kinds={kinds}", f"--emulate-slowdown={slowdown}"]
        assert parse_slowdown(slowdown, 2)


def test_a_smaller_job_leaves_a_scripts_own_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAITIAN_EMULATE_KINDS", "gpu,mlu,mlu,npu")
    line = "mpirun -np 4 --host a:1,b:2,c:1 kaitian-run --adaptive train.py --lr 1"
    job = supervise.make_job(line.split())
    assert plan_start(job, frozenset(), True, "new").words == line.split()
    smaller = "mpirun -np 2 --host a:1,c:1 kaitian-run --adaptive --emulate-kinds=gpu,mlu train.py"
    assert plan_start(job, frozenset("b"), True, "new").words == [*smaller.split(), "--lr", "1"]
    line = "mpirun -np 3 --host a:1,b:1,c:1 kaitian-run --emulate-slowdown 1:3,2:2 -m train -x"
    slowed = supervise.make_job(line.split())
    words = plan_start(slowed, frozenset("b"), True, "new").words
    smaller = "-m --emulate-kinds=gpu,mlu --emulate-slowdown=1:3 train -x"
    assert words[-5:] == smaller.split()
    assert not job.owns_snapshots
    assert environment(job)["OMPI_KAITIAN_JOB_FOLDER"] == str(tmp_path / job.folder)


def test_a_host_has_a_rank_for_each_device_of_its_environments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").write_text("a slots=8\nb slots=2\n")
    cuda = Environment("/c/python", ("cuda:0", "cuda:1"))
    environments = {"a": (cuda, Environment("/r/python", ("rocm:0",)))}
    line = "mpirun -np 5 --hostfile hf kaitian-train --run-dir x"
    job = supervise.make_job(line.split(), None, environments)
    assert plan_start(job, frozenset(), False, "new").shape == "5 ranks on a, b"
    smaller = plan_start(job, frozenset("b"), False, "new")
    assert smaller.shape == "3 ranks on a"
    assert "--host a:2 -np 2 /c/python -m" in " ".join(smaller.words)


@pytest.mark.parametrize("flag", ["--resume old", "--resume=old"])
def test_the_users_resume_flag_holds_until_there_is_progress(flag):
    job = make_job(f"mpirun -np 2 kaitian-train {flag}")
    assert "--resume=auto" not in flags_of(job, "")
    words = flags_of(job, "", trained=True)
    assert words.index("--resume=auto") > words.index(flag.split()[0])


def test_snapshots_have_the_users_name_or_one_that_is_in_no_command_line():
    """Other users of a host can read the command lines of its processes."""
    named = make_job("mpirun kaitian-train --snapshots=mine")
    assert [word for word in flags_of(named, "") if "snapshots" in word] == ["--snapshots=mine"]
    assert not named.owns_snapshots
    unnamed = make_job("mpirun kaitian-train")
    assert unnamed.owns_snapshots
    words = plan_start(unnamed, frozenset(), False, "new").words
    assert not any("beef" in word for word in words)
    assert environment(unnamed)["OMPI_KAITIAN_SNAPSHOTS"] == "beef"
