"""Tests of the hostfile, of the filters --include and --exclude, and of valid host names."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.launch.hostfile import (
    HostError,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    limit_hosts,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from windlass.launch.launch_errors import LaunchError
from windlass.launch.shell_quoting import check_host_name

POOL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1], "worker-2": [0]}


def test_a_hostfile_is_read_in_its_order() -> None:
    text = "\n# first\n b slots=4 max_slots=8\n\n  a   slots=2\n#c slots=1\n user@10.0.0.7\tslots=1 # fast\n"
    assert list(parse_hostfile(text.splitlines()).items()) == [("b", 4), ("a", 2), ("user@10.0.0.7", 1)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a slots=2", "a slots=1"], "h, line 2: a is listed already; write one entry for each host"),
        (["a slots=two"], "h, line 1: 'a slots=two' is a bad entry; write HOST slots=N"),
        (["a"], "h, line 1: 'a' is a bad entry; write HOST slots=N"),
        (["slots=3"], "h, line 1: 'slots=3' is a bad entry; write HOST slots=N"),
        ([], "h is empty; write a line HOST slots=N for each host"),
        (["# only", ""], "h is empty; write a line HOST slots=N for each host"),
        (["-oProxyCommand=id slots=1"], "h, line 1: '-oProxyCommand=id' is not a host name; "),
    ],
)
def test_a_bad_hostfile_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_hostfile(lines, source="h")
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)


def test_missing_hostfile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr("windlass.launch.hostfile.logger.warning", lambda text, *values: reported.append(text % values))
    assert fetch_hostfile(tmp_path / "none") is None
    assert reported == [f"no hostfile at {tmp_path}/none: only this machine is used"]
    (tmp_path / "some").write_text("a slots=3\n")
    assert fetch_hostfile(hostfile_path=str(tmp_path / "some")) == {"a": 3}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("worker-1@worker-0:0,2", "", {"worker-0": [0, 2], "worker-1": [0, 1]}),
        ("worker-0:2@worker-0:0,2", "", {"worker-0": [0, 2]}),
        ("worker-0@worker-0:1", "", {"worker-0": [0, 1, 2, 3]}),
        ("worker-1:0@worker-1", "", {"worker-1": [0, 1]}),
        ("worker-2", "", {"worker-2": [0]}),
        ("", "worker-1:0", {"worker-0": [0, 1, 2, 3], "worker-1": [1], "worker-2": [0]}),
        ("", "worker-0@worker-2:0", {"worker-1": [0, 1]}),
        ("", "worker-0@worker-2@worker-0:1", {"worker-1": [0, 1]}),
        ("", "worker-1:0,1@worker-0:3", {"worker-0": [0, 1, 2], "worker-2": [0]}),
    ],
)
def test_filters(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    actual = parse_resource_filter(POOL, include, exclude)
    assert list(actual.items()) == list(expected.items())
    assert parse_inclusion_exclusion({name: len(slots) for name, slots in POOL.items()}, include, exclude) == expected


@pytest.mark.parametrize("text", ["user@h:0@other", "other@user@h:0", "user@h:0@other:0,1"])
def test_a_filter_may_name_hosts_with_users(text: str) -> None:
    pool = {"user@h": [0, 1], "other": [0, 1]}
    assert parse_resource_filter(pool, text) == {"user@h": [0], "other": [0, 1]}


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "--include and --exclude together; give one of them"),
        ("jeff", "", "host 'jeff' is not in the hostfile; there are worker-0, worker-1, worker-2"),
        ("", "jeff:0", "host 'jeff' is not in the hostfile; there are worker-0, worker-1, worker-2"),
        ("worker-1:4", "", "host 'worker-1' has no slot 4; there are 0,1"),
        ("", "worker-1:0,4", "host 'worker-1' has no slot 4; there are 0,1"),
        ("worker-1@worker-1:4", "", "host 'worker-1' has no slot 4; there are 0,1"),
        ("worker-1:x", "", "'worker-1:x' in 'worker-1:x' is not NAME[:SLOT[,SLOT...]]; slots are numbers below 4,096"),
        ("worker-1:", "", "'worker-1:' in 'worker-1:' is not NAME[:SLOT[,SLOT...]]; slots are numbers below 4,096"),
        ("worker-1@", "", "'worker-1@' names no host before ''; write NAME[:SLOT[,SLOT...]][@...]"),
    ],
)
def test_contradictory_filters_are_refused(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_resource_filter(POOL, include, exclude)
    assert str(caught.value) == message


def test_filters_accept_host_names_with_separators() -> None:
    pool = {"me@a": [0, 1], "fd00::2": [0, 1], "a": [0]}
    for text, expected in (
        ("me@a", {"me@a": [0, 1]}),
        ("me@a:1@fd00::2:0", {"me@a": [1], "fd00::2": [0]}),
        ("fd00::2@a:0@me@a:0", {"me@a": [0], "fd00::2": [0, 1], "a": [0]}),
    ):
        assert parse_resource_filter(pool, text) == expected
    with pytest.raises(HostError, match="host 'you' is not in the hostfile"):
        parse_resource_filter(pool, "you@a")


def test_hostfile_with_crlf_and_bom(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n")
    assert fetch_hostfile(tmp_path / "hosts") == {"a": 2, "b": 1}
    (tmp_path / "hosts").write_bytes(b"\xff\xfea")
    with pytest.raises(HostError, match="hosts is not a text file: .* write a line HOST slots=N"):
        fetch_hostfile(tmp_path / "hosts")


def test_the_first_hosts_and_slots() -> None:
    assert limit_hosts(POOL) == POOL
    assert limit_hosts(POOL, 2) == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}
    assert limit_hosts({"none": [], "one": [0]}, -1, 2) == {"none": [], "one": [0, 1]}
    assert limit_hosts(POOL, 2, 1) == {"worker-0": [0], "worker-1": [0]}
    assert limit_hosts(POOL, -1, 3)["worker-2"] == [0, 1, 2], "DeepSpeed does not hold the number against the slots"
    with pytest.raises(HostError, match="4 nodes are requested, and the hostfile has 3; request fewer"):
        limit_hosts(POOL, 4)


NAMES = st.text(st.characters(exclude_characters=":@"), min_size=1)


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 99), min_size=1, unique=True), min_size=1))
def test_world_info_round_trips(world: dict[str, list[int]]) -> None:
    text = encode_world_info(world)
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert list(decode_world_info(text).items()) == list(world.items())


def test_world_info_encoding_equals_deepspeed() -> None:
    assert encode_world_info({"a": [0, 1], "b": [2]}) == "eyJhIjogWzAsIDFdLCAiYiI6IFsyXX0="
    for text in ("None", base64.urlsafe_b64encode(b'{"a": "0,1"}').decode(), encode_world_info({"a": 2})):
        with pytest.raises(HostError, match="is not base64 of {host: .slot, ...]}"):
            decode_world_info(text)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5), min_size=1), st.data())
def test_include_and_exclude_are_complementary(pool: dict[str, int], data: st.DataObject) -> None:
    slots = [(name, slot) for name, count in pool.items() for slot in range(count)]
    chosen = data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True))
    text = "@".join(f"{name}:{slot}" for name, slot in chosen)
    included = parse_inclusion_exclusion(pool, text, "")
    excluded = parse_inclusion_exclusion(pool, "", text)
    both = [(name, slot) for part in (included, excluded) for name, slots in part.items() for slot in slots]
    assert sorted(both) == sorted(slots)
    assert {(name, slot) for name, slots in included.items() for slot in slots} == set(chosen)


@pytest.mark.parametrize("name", ["a", "node-01.cluster", "10.0.0.1", "me@node_1", "fe80::1%eth0", "[::1]", "A_b"])
def test_names_of_hosts(name: str) -> None:
    assert check_host_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "-oProxyCommand=id", "a b", "a;id", "a\n", "$(id)", "a,b", "a'", "me@-x", "a@b@c", "ä", "a/b", "`id`", "@a"],
)
def test_invalid_host_names_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="is not a host name"):
        check_host_name(name)
