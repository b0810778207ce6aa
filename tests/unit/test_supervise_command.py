"""Parsing and rebuilding the command line, hostfiles and host lists of a supervised job."""

import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.supervise.hosts import (
    Host,
    choose,
    host_list_without,
    hostfile_without,
    parse_host_list,
    parse_hostfile,
)
from kaitian_mpi.supervise.mpirun_command import HOST_LISTS, HOSTFILES, RANKS, TRAIN, parse_command
from kaitian_mpi.supervise.remote_hosts import find_agent, is_local, probe_command


def test_mpirun_options_are_parsed():
    for options, ranks, files, lists in (
        ("", None, [], []),
        ("-np 4", 4, [], []),
        ("--np 4", 4, [], []),
        ("-c 4", 4, [], []),
        ("--np=4", 4, [], []),
        ("-np 4 -np 2", 4, [], []),  # as Open MPI: the first counts
        ("-np x", None, [], []),
        ("--hostfile hf -np 3", 3, ["hf"], []),
        ("--hostfile=hf", None, ["hf"], []),
        ("--default-hostfile hf", None, ["hf"], []),
        ("-f hf", None, ["hf"], []),
        ("--hostfile hf --hostfile hg", None, ["hf", "hg"], []),
        ("--host a:2,b", None, [], ["a:2,b"]),
        ("-H a,b", None, [], ["a,b"]),
        ("--host=a --host b", None, [], ["a", "b"]),
        ("-hosts a:2", None, [], ["a:2"]),
        ("--allow-run-as-root -x FOO=1 --mca btl tcp,self --map-by :over -np 2", 2, [], []),
        ("--tag-output --prtemca=plm ssh --bind-to none --hostfile hf", None, ["hf"], []),
        ("-genv A 1 -ppn 2 -n 4", 4, [], []),
        ("--with-ft ulfm --hostfile hf -np 2", 2, ["hf"], []),
        # Words after the first non-option belong to another program.
        ("-np 2 taskset -c 0,1", 2, [], []),
        ("numactl -H -n 1", None, [], []),
    ):
        words = ["mpirun", *options.split(), "/opt/bin/kaitian-train", "-np", "9", "--host", "z"]
        command = parse_command(words)
        assert (command.ranks, command.values(HOSTFILES)) == (ranks, files)
        assert command.values(HOST_LISTS) == lists
        assert command.arguments == ("-np", "9", "--host", "z")
        assert command.words == words


def test_mpirun_options_are_replaced_in_place():
    given = parse_command(
        "mpirun -np 4 --hostfile=hf --host a --host=b kaitian-train -np 4".split()
    )
    for names, values, options in (
        (RANKS, ["3"], "-np 3 --hostfile=hf --host a --host=b"),
        (HOSTFILES, ["new"], "-np 4 --hostfile=new --host a --host=b"),
        (HOST_LISTS, ["x"], "-np 4 --hostfile=hf --host x"),
        (HOST_LISTS, ["", "y"], "-np 4 --hostfile=hf --host=y"),
        (HOST_LISTS, [], "-np 4 --hostfile=hf"),
    ):
        words = f"mpirun {options} kaitian-train -np 4".split()
        assert given.replaced(names, values).words == words


def test_the_training_program_and_its_arguments_are_found():
    for line, arguments in (
        ("mpirun -np 2 kaitian-train --epochs 3", ["--epochs", "3"]),
        ("mpirun -np 2 kaitian-train --run-dir runs/kaitian-train", ["--run-dir", None]),
        ("mpirun -np 2 python -m kaitian_mpi.cli.train --lr 1", ["--lr", "1"]),
        ("mpirun -np 2 nice -n 5 /a/b/kaitian-train --lr 1", ["--lr", "1"]),
        ("nice -n 5 mpirun -np 2 kaitian-train", []),
        ("kaitian-train --lr 1", ["--lr", "1"]),
        ("env A=1 kaitian-train", []),
        ("mpirun -np 2 kaitian-run train.py --lr 1", ["train.py", "--lr", "1"]),
        ("mpirun -np 2 python -m kaitian_mpi.cli.run -m train", ["-m", "train"]),
        ("mpirun -np 2 kaitian-run kaitian-train", ["kaitian-train"]),
    ):
        command = parse_command(line.split())
        assert command.program == ("kaitian-run" if "run " in line.partition("-np 2")[2] else TRAIN)
        expected = ["runs/kaitian-train" if word is None else word for word in arguments]
        assert (list(command.arguments), command.words) == (expected, line.split())
    for line in (
        "", "mpirun -np 2 python train.py", "mpirun -np 2 kaitian-train.py",
        "mpirun -x kaitian-train python train.py", "mpirun -np 2 python -m kaitian_mpi.cli.plan",
        "mpirun -np 1 kaitian-train : -np 1 kaitian-train",
    ):  # fmt: skip
        why = "has several programs separated by ':'" if ":" in line else "must start kaitian-train"
        with pytest.raises(UserError, match=f"the command {why}"):
            parse_command(line.split())


def test_a_variable_of_the_ranks_is_read():
    for line, value in (
        ("mpirun -np 2 kaitian-train", "here"), ("mpirun -x A -np 2 kaitian-train", "here"),
        ("mpirun -x A=b,c -np 2 kaitian-train", "b,c"),
        ("mpirun -np 2 env B=1 A=b,c kaitian-train", "b,c"),
        ("env A=b mpirun -np 2 kaitian-train", "b"), ("mpiexec -genv A b -n 2 kaitian-train", "b"),
        ("mpiexec -env A b -n 2 kaitian-train", "b"), ("mpirun -x A= -np 2 kaitian-train", ""),
        ("mpirun -x AA=b -np 2 kaitian-train --set A=b", "here"),
    ):  # fmt: skip
        assert parse_command(line.split()).variable("A", {"A": " here "}) == value


def test_the_launch_agent_is_mpiruns():
    for words, environ, agent in (
        ([], {}, ["ssh"]),
        ([], {"PRTE_MCA_plm_ssh_agent": "env -i A=1"}, ["env", "-i", "A=1"]),
        ([], {"OMPI_MCA_plm_ssh_agent": "env"}, ["env"]),
        ([], {"OMPI_MCA_plm_rsh_agent": "env"}, ["env"]),
        ([], {"PRTE_MCA_plm_ssh_agent": "nowhere/to/be/found : env -i"}, ["env", "-i"]),
        ([], {"PRTE_MCA_plm_ssh_agent": "env 'a b'"}, ["env", "a b"]),
        ([], {"PRTE_MCA_plm_ssh_agent": ""}, ["ssh"]),
        (["--mca", "plm_ssh_agent", "env"], {"PRTE_MCA_plm_ssh_agent": "true"}, ["env"]),
        (["--prtemca", "plm_ssh_agent", "env -i"], {}, ["env", "-i"]),
        (["--mca", "plm_rsh_agent", "env"], {}, ["env"]),
        (["--mca", "btl", "tcp"], {}, ["ssh"]),
        (["-launcher-exec", "env"], {"HYDRA_LAUNCHER_EXEC": "false"}, ["env"]),  # MPICH's
        ([], {"HYDRA_LAUNCHER_EXEC": "env"}, ["env"]),
    ):
        command = parse_command(["mpirun", *words, "kaitian-train"])
        assert find_agent(command, environ) == agent


def slots_of(hosts):
    return {host.name: host.slots for host in hosts}


def test_the_slots_of_a_hostfile_are_those_that_mpirun_counts():
    for text, slots in (
        ("", {}),
        ("# nothing\n\n  \n// nothing\n", {}),
        ("a slots=4\nb slots=2\n", {"a": 4, "b": 2}),
        ("b slots=2 max_slots=8 # fast\na\tslots = 3", {"b": 2, "a": 3}),
        ("a cpu=4\nb count=2\nc max_slots=2", {"a": 4, "b": 2, "c": None}),
        ("a", {"a": None}),
        ("a\na\nb\na", {"a": 3, "b": None}),
        ("a slots=2\na", {"a": 3}),
        ("a slots=2\na slots=3", {"a": 5}),
        ("a:4\nb:2", {"a": 4, "b": 2}),
        ("10.77.0.1 slots=1\nnode-2.r_1.org slots=1", {"10.77.0.1": 1, "node-2.r_1.org": 1}),
        ("a slots=2\r\nb slots=1\r\n", {"a": 2, "b": 1}),
    ):
        assert list(slots_of(parse_hostfile(text, "hf")).items()) == list(slots.items())


def test_lost_hosts_are_removed_from_a_hostfile_or_list():
    text = "# ours\nb slots=1\na slots = 2 max_slots=3 # fast\nme@b\nbb:2\n"
    assert hostfile_without(text, {"b"}) == "a slots = 2 max_slots=3 # fast\nbb:2\n"
    assert hostfile_without(text, {"a", "b", "bb"}) == ""
    assert host_list_without("a:2, me@b:3,c,b", {"b"}) == "a:2,c"
    assert host_list_without("b", {"b"}) == ""


def test_hosts_are_probed_as_their_users_without_a_prompt():
    for line, user, port in (
        ("a", "", 0), ("me@a slots=2", "me", 0), ("a slots=2 username=me", "me", 0),
        ("a user-name=me port=2222", "me", 2222),
    ):  # fmt: skip
        (host,) = parse_hostfile(line, "hf")
        assert (host.name, host.user, host.port) == ("a", user, port)
    options = "-o BatchMode=yes -o ConnectTimeout=3"
    for agent, words in (
        (["rsh", "-x"], "rsh -x me@a true"),
        (["/usr/bin/ssh", "-F", "x"], f"/usr/bin/ssh -F x {options} -p 2222 me@a true"),
    ):
        assert probe_command(agent, host, 2.5, ["true"]) == words.split()


def test_which_hosts_are_this_one():
    names = "localhost", "127.0.1.1", "198.51.100.1"  # the last one belongs to nobody
    assert [*map(is_local, names)] == [True, True, False]


INVALID = "-oProxyCommand=reboot a;reboot $(reboot) me@-oProxyCommand=reboot -l@a me@you@a +n1 ^a"


@pytest.mark.parametrize("entry", [*INVALID.split(), "a:x", "bücher", "fe80::1"])
def test_invalid_host_names_are_rejected(entry):
    with pytest.raises(UserError, match=r"hf, line 2: .* is not a host name"):
        parse_hostfile(f"# first\n{entry}\n", "hf")
    with pytest.raises(UserError, match=r"--host: .* is not a host name"):
        parse_host_list(f"b,{entry}")
    if "=" in entry and "@" not in entry:
        with pytest.raises(UserError, match="hf, line 1: '-oProxyCommand=reboot' is not"):
            parse_hostfile(f"a username={entry}", "hf")


def test_a_host_list_is_parsed_filters_the_hostfile_and_sets_the_slots():
    for text, slots in (
        *(("a", {"a": 1}), ("a,b", {"a": 1, "b": 1}), ("a:2,b", {"a": 2, "b": 1})),
        *(("a:2, b:1 ,a", {"a": 3, "b": 1}), ("a:*,b:auto", {"a": None, "b": None})),
        ("me@a:4", {"a": 4}),
    ):
        assert slots_of(parse_host_list(text)) == slots
    from_file = parse_hostfile("a slots=4\nme@b slots=4\nc slots=4", "hf")
    chosen = choose(from_file, parse_host_list("b:2,a"))
    assert chosen == (Host(name="a", slots=1), Host(name="b", slots=2, user="me"))
    assert choose(from_file, ()) == from_file
    assert slots_of(choose((), parse_host_list("b:2"))) == {"b": 2}
    assert choose((), ()) == ()
