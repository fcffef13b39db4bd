"""Hosts on this machine: whole, apart, lost at once, replaced, and gone with their owner."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from snapshot_waits import until

from holdfast.errors import ConfigError, HoldfastError
from holdfast_lab.trainer import process_groups
from holdfast_lab.trainer.hosts import KINDS, Cluster, Host, hosts, kind_here
from holdfast_lab.trainer.namespaces import Switch
from holdfast_lab.trainer.process_groups import Loopback

pytestmark = [pytest.mark.processes, pytest.mark.representative]

ROOT = str(Path(__file__).parents[3])
PATIENCE_S = 15.0
# A trainer's kind of mess: a child, one in a session of its own, and a daemon of the latter.
MESS = """
sleep {id} &
setsid sh -c 'sleep {id} & (sleep {id} &) ; sleep {id}' &
wait
"""
OWNER = """
import sys, time
from pathlib import Path
from holdfast_lab.trainer.hosts import hosts
with hosts(1, Path(sys.argv[2]), kind=sys.argv[1]) as cluster:
    cluster[0].run(["sh", "-c", sys.argv[3]], log=Path(sys.argv[2], "log"))
    time.sleep(60)
"""


def _needs(kind: str) -> None:
    reason = kind_here()[1]
    if kind == Switch.kind and reason:
        pytest.skip(f"no namespaces: {reason}")


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    _needs(request.param)
    with hosts(2, tmp_path / "hosts", kind=request.param) as made:
        assert made.kind == request.param
        yield made


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Cluster]:
    _needs(Switch.kind)
    with hosts(2, tmp_path / "hosts", kind=Switch.kind) as made:
        yield made


@pytest.fixture
def seconds() -> str:
    """A time to sleep that no other process sleeps."""
    return f"{10_000 + os.getpid()}.{time.monotonic_ns() % 10**6}"


def _sleeping(seconds: str) -> list[psutil.Process]:
    found = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def _start_mess(host: Host, seconds: str, before: int = 0) -> "subprocess.Popen[bytes]":
    process = host.run(["sh", "-c", MESS.format(id=seconds)], log=host.run_dir / "log")
    until(lambda: len(_sleeping(seconds)) == before + 4, "the mess is made")
    return process


def _said(host: Host, script: str) -> str:
    log = host.run_dir.parent / f"said-{time.monotonic_ns()}"
    process = host.run(["sh", "-c", script], log=log)
    assert process.wait(PATIENCE_S) == 0, log.read_text()
    return log.read_text().strip()


def test_a_killed_host_loses_every_process_and_no_other_host_does(
    cluster: Cluster, seconds: str
) -> None:
    process = _start_mess(cluster[0], seconds)
    _start_mess(cluster[1], seconds, before=4)
    cluster[0].kill()
    assert process.returncode == -signal.SIGKILL
    assert len(_sleeping(seconds)) == 4
    cluster[1].kill()
    assert _sleeping(seconds) == []
    with pytest.raises(HoldfastError, match=r"host-0 was killed: start true on its replacement"):
        cluster[0].run(["true"], log=cluster.folder / "log")


def test_a_replacement_is_another_machine_with_nothing_on_it(cluster: Cluster) -> None:
    first = cluster[1]
    _said(first, "echo precious > $HOLDFAST_RUN_DIR/data")
    second = first.replace()
    assert not first.alive
    assert cluster[1] is second
    assert list(second.run_dir.iterdir()) == []
    assert (second.name, second.run_dir.name) == ("host-1b", "host-1b")
    assert second.address not in (first.address, cluster[0].address)
    assert _said(second.replace(), "basename $HOLDFAST_RUN_DIR") == "host-1bb"
    assert len(cluster) == 2


def test_a_hosts_processes_are_told_who_they_are(cluster: Cluster) -> None:
    told = _said(cluster[1], "echo $HOLDFAST_RUN_DIR $GLOO_SOCKET_IFNAME")
    assert told.split() == [str(cluster[1].run_dir), cluster[1].interface]
    log = cluster.folder / "exit"
    assert cluster[0].run(["sh", "-c", "exit $CODE"], env={"CODE": "7"}, log=log).wait(5) == 7


SERVE = """
import socket
with socket.create_server(("{address}", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].close()
"""
REACH = """
import socket
socket.create_connection(("{address}", {port}), timeout={timeout_s}).close()
"""


def _serve(host: Host) -> int:
    log = host.run_dir / "port"
    host.run([sys.executable, "-c", SERVE.format(address=host.address)], log=log)
    until(lambda: log.read_text().endswith("\n"), "a port is served")
    return int(log.read_text())


def _reaches(host: Host, address: str, port: int, timeout_s: float = 5.0) -> bool:
    script = REACH.format(address=address, port=port, timeout_s=timeout_s)
    return host.run([sys.executable, "-c", script], log=host.run_dir / "log").wait(PATIENCE_S) == 0


def test_hosts_reach_each_other_until_one_is_killed(cluster: Cluster) -> None:
    port, address = _serve(cluster[1]), cluster[1].address
    assert _reaches(cluster[0], address, port)
    cluster[1].kill()
    assert not _reaches(cluster[0], address, port, 0.5)


def test_this_process_serves_all_hosts_at_the_gateway(cluster: Cluster) -> None:
    server = cluster.call(lambda: socket.create_server((cluster.gateway, 0)))
    with server:
        port = server.getsockname()[1]
        assert [_reaches(host, cluster.gateway, port) for host in cluster] == [True, True]
    with pytest.raises(ZeroDivisionError):
        cluster.call(lambda: 1 // 0)


def _gateway_seen_by(host: Host, cluster: Cluster) -> str:
    """The link-layer address at which a host finds the gateway."""
    with cluster.call(lambda: socket.create_server((cluster.gateway, 0))) as server:
        assert _reaches(host, cluster.gateway, server.getsockname()[1])
    return _said(host, f"ip neigh show {cluster.gateway}").split()[4]


def test_the_gateway_is_the_same_when_hosts_come_and_go(wired: Cluster) -> None:
    before = _gateway_seen_by(wired[0], wired)
    for host in list(wired):
        host.replace()
    time.sleep(1.0)  # the kernel takes a lost host's cable away in its own time
    assert _gateway_seen_by(wired[1], wired) == before


def test_a_link_is_cut_and_mended_while_the_host_runs_on(wired: Cluster, seconds: str) -> None:
    port, address = _serve(wired[1]), wired[1].address
    _start_mess(wired[1], seconds)
    wired[1].link(up=False)
    assert not _reaches(wired[0], address, port, 0.5)
    assert len(_sleeping(seconds)) == 4
    wired[1].link(up=True)
    assert _reaches(wired[0], address, port)


def test_namespaces_have_a_name_and_a_network_of_their_own(wired: Cluster) -> None:
    here = {os.uname().nodename, *psutil.net_if_addrs()}
    assert [_said(host, "cat /proc/sys/kernel/hostname") for host in wired] == ["host-0", "host-1"]
    addresses = [_said(host, "ip -br -4 addr show eth0").split()[2] for host in wired]
    assert addresses == [f"{host.address}/16" for host in wired]
    assert {os.uname().nodename, *psutil.net_if_addrs()} == here


def test_process_groups_have_no_link_to_cut(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="network of their own: run as root")
    with hosts(1, tmp_path, kind=Loopback.kind) as cluster, refused:
        cluster[0].link(up=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_leaves_nothing(kind: str, tmp_path: Path, seconds: str) -> None:
    _needs(kind)

    def interrupted() -> None:
        with hosts(2, tmp_path, kind=kind) as cluster:
            _start_mess(cluster[1], seconds)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert _sleeping(seconds) == []


def _kill_owner(kind: str, folder: Path, seconds: str) -> None:
    folder.mkdir()
    command = [sys.executable, "-c", OWNER, kind, str(folder), MESS.format(id=seconds)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ROOT}) as owner:
        try:
            until(lambda: len(_sleeping(seconds)) == 4, "the owner's mess is made")
        finally:
            owner.kill()


def test_namespaces_end_with_their_owner(tmp_path: Path, seconds: str, forked_python: None) -> None:
    _needs(Switch.kind)
    _kill_owner(Switch.kind, tmp_path / "hosts", seconds)
    until(lambda: not _sleeping(seconds), "the hosts of a dead owner are gone")


def test_what_a_dead_owner_left_is_killed_when_hosts_are_next_made(
    tmp_path: Path, seconds: str, forked_python: None
) -> None:
    with hosts(1, tmp_path / "ours", kind=Loopback.kind) as ours:
        _start_mess(ours[0], seconds)
        _kill_owner(Loopback.kind, tmp_path / "theirs", other := seconds + "1")
        assert len(_sleeping(other)) == 4
        with hosts(1, tmp_path / "next", kind=Loopback.kind):
            assert _sleeping(other) == []
        assert len(_sleeping(seconds)) == 4


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 65):
        with pytest.raises(ConfigError, match=f"{count} hosts cannot be made: at least 1"):
            hosts(count, tmp_path).__enter__()
    with pytest.raises(ConfigError, match="kind = 'vms' is unknown; valid: network namespaces"):
        hosts(1, tmp_path, kind="vms").__enter__()
    (tmp_path / "host-0").mkdir()
    with pytest.raises(ConfigError, match="host-0: File exists"):
        hosts(1, tmp_path).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert kind_here() == (Loopback.kind, "that takes root")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare, nsenter, ip not found" in kind_here()[1]


def test_a_process_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "LIMIT_S", 0.1)
    monkeypatch.setattr(process_groups, "_marked", lambda: [(7, "1.2.3")])
    monkeypatch.setattr(process_groups, "_kill", lambda pid, mark: True)
    with pytest.raises(HoldfastError, match=r"processes \[7\] do not end after SIGKILL"):
        process_groups.kill_marked(lambda mark: True)
