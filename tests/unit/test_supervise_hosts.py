"""Hostfiles and host lists of a supervised job: parsing, filtering, and removing hosts."""

import pytest

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.hosts import (
    Host,
    choose,
    host_list_without,
    hostfile_without,
    parse_host_list,
    parse_hostfile,
)


def slots_of(hosts):
    return {host.name: host.slots for host in hosts}


@pytest.mark.parametrize(
    ("text", "slots"),
    [
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
    ],
)
def test_parsing_a_hostfile(text, slots):
    # The order counts as well.
    assert list(slots_of(parse_hostfile(text, "hf")).items()) == list(slots.items())


@pytest.mark.parametrize(
    ("line", "user", "port"),
    [
        ("a", "", 0),
        ("me@a slots=2", "me", 0),
        ("a slots=2 username=me", "me", 0),
        ("a user-name=me port=2222", "me", 2222),
    ],
)
def test_parsing_the_login_of_a_host(line, user, port):
    (host,) = parse_hostfile(line, "hf")
    assert (host.name, host.user, host.port) == ("a", user, port)


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


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a", {"a": 1}),
        ("a,b", {"a": 1, "b": 1}),
        ("a:2,b", {"a": 2, "b": 1}),
        ("a:2, b:1 ,a", {"a": 3, "b": 1}),
        ("a:*,b:auto", {"a": None, "b": None}),
        ("me@a:4", {"a": 4}),
    ],
)
def test_parsing_a_host_list(text, slots):
    assert slots_of(parse_host_list(text)) == slots


def test_a_host_list_filters_the_hostfile_and_sets_the_slots():
    from_file = parse_hostfile("a slots=4\nme@b slots=4\nc slots=4", "hf")
    chosen = choose(from_file, parse_host_list("b:2,a"))
    assert chosen == (Host(name="a", slots=1), Host(name="b", slots=2, user="me"))
    assert choose(from_file, ()) == from_file
    assert slots_of(choose((), parse_host_list("b:2"))) == {"b": 2}
    assert choose((), ()) == ()


def test_lost_hosts_are_removed_from_hostfiles_and_host_lists():
    text = "# ours\nb slots=1\na slots = 2 max_slots=3 # fast\nme@b\nbb:2\n"
    assert hostfile_without(text, {"b"}) == "a slots = 2 max_slots=3 # fast\nbb:2\n"
    assert hostfile_without(text, {"a", "b", "bb"}) == ""
    assert host_list_without("a:2, me@b:3,c,b", {"b"}) == "a:2,c"
    assert host_list_without("b", {"b"}) == ""
