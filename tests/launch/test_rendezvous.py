"""The rendezvous of several hosts, each a thread of this process."""

import importlib
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from holdfast.launch import quick, rendezvous
from holdfast.torchrun import OWN_STORE_VARIABLE

# What holdfast.launch.quick takes from torch that is not public there.
PRIVATE = ("_Action", "_BackendRendezvousStateHolder", "_DistributedRendezvousOpExecutor")
PRIVATE += ("_NodeDesc", "_RendezvousContext", "_RendezvousJoinOp", "_RendezvousKeepAliveOp")
METHODS = ("_BackendRendezvousStateHolder._sanitize", "_DistributedRendezvousOpExecutor._record")


class Hosts:
    """Hosts, by number, and what the rendezvous told each of them last."""

    def __init__(self, group: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.group, self.handlers, self.told = group, {}, {}
        self._threads: list[threading.Thread] = []

    def join(self, *numbers: int) -> None:
        for number in numbers:
            if number not in self.handlers:
                params = RendezvousParameters(
                    rendezvous.QUICK_BACKEND,
                    f"127.0.0.1:{self.store.port}",
                    "run",
                    self.group,
                    self.group,
                    f"127.0.0.{number + 1}",
                    is_host="0",
                )
                self.handlers[number] = rendezvous._create_dynamic(params)
            self.told.pop(number, None)
            self._threads.append(threading.Thread(target=self._join, args=[number]))
            self._threads[-1].start()

    def _join(self, number: int) -> None:
        try:
            self.told[number] = self.handlers[number].next_rendezvous()
        except RendezvousError as error:
            self.told[number] = error

    def wait(self, *numbers: int) -> list[Any]:
        deadline = time.monotonic() + 30
        while not self.told.keys() >= set(numbers):
            assert time.monotonic() < deadline, f"only {sorted(self.told)} have joined"
            time.sleep(0.01)
        return [self.told[number] for number in numbers]

    def waiting(self, number: int) -> int:
        time.sleep(2 * rendezvous.POLL_S)
        return int(self.handlers[number].num_nodes_waiting())

    def close(self) -> None:
        for handler in self.handlers.values():
            handler.shutdown()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv(OWN_STORE_VARIABLE, "1")  # as holdfast run does
    found = Hosts(group=2)
    yield found
    found.close()


def ports(infos: list[Any]) -> set[int]:
    return {info.bootstrap_store_info.master_port for info in infos}


def test_a_reserve_takes_the_place_of_a_lost_host_only(hosts: Hosts) -> None:
    hosts.join(0, 1)
    first = hosts.wait(0, 1)
    hosts.join(2)
    for _ in range(3):  # hosts that start again at the same time keep their places
        assert hosts.waiting(0) == hosts.waiting(1) == 0
        hosts.join(0, 1)
        again = hosts.wait(0, 1)
        assert {info.rank for info in again} == {0, 1}
        assert len(ports(again)) == 1
        assert ports(again) != ports(first)
    holder = hosts.handlers[0]._state_holder
    holder.sync()
    holder.state.wait_list.add(dynamic_rendezvous._NodeDesc("late", 1, 0))  # no room for it
    assert hosts.handlers[0].num_nodes_waiting() == 0
    (port,) = ports(again)
    TCPStore(again[0].bootstrap_store_info.master_addr, port, is_master=False).set("key", "value")
    assert hosts.handlers[0].use_agent_store
    assert 2 not in hosts.told
    lost_s = time.monotonic()
    hosts.handlers[1]._stop_heartbeats()
    while hosts.waiting(0) == 0:
        assert time.monotonic() - lost_s < 30
    assert time.monotonic() - lost_s > 0.5  # not before its heartbeats were missed
    hosts.join(0)
    replaced = hosts.wait(0, 2)
    assert {info.rank for info in replaced} == {0, 1}
    assert len(ports(replaced)) == 1


def test_of_too_many_hosts_one_is_left_and_nobody_starts_again_for_it(hosts: Hosts) -> None:
    hosts.join(0, 1)
    hosts.wait(0, 1)
    hosts.join(0)
    time.sleep(1)  # it waits; so does one that comes now, and there is room for one of them
    hosts.join(2)
    while hosts.waiting(1) < 2:
        pass
    hosts.told.clear()
    hosts.join(1)
    hosts.wait(1)
    while len(hosts.told) < 2:
        time.sleep(0.01)
    assert hosts.waiting(1) == 0
    state = hosts.handlers[1]._state_holder.state
    assert not state.wait_list
    assert len(state.redundancy_list) == 1


class Backend:
    """The state of two hosts, one with a clock that differs by an hour."""

    name = "fixed"

    def __init__(self, ahead: timedelta) -> None:
        self.state, self.ahead = dynamic_rendezvous._RendezvousState(), ahead
        self.node = dynamic_rendezvous._NodeDesc("other", 1, 0)
        self.state.participants = {self.node: 0}

    def beat(self) -> None:
        self.state.last_heartbeats[self.node] = datetime.now(UTC) + self.ahead

    def get_state(self) -> tuple[bytes, int]:
        return pickle.dumps(self.state), 1

    def set_state(self, *_: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("ahead", [timedelta(hours=1), -timedelta(hours=1)])
def test_a_host_with_another_clock_is_lost_only_without_heartbeats(
    ahead: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, now_s = Backend(ahead), [100.0]
    limits = dynamic_rendezvous.RendezvousTimeout()
    settings = dynamic_rendezvous.RendezvousSettings(
        "run", 1, 2, limits, timedelta(seconds=0.25), 4
    )
    holder = quick.Holder(backend, settings, 0)  # type: ignore[arg-type]
    stock = dynamic_rendezvous._BackendRendezvousStateHolder(backend, settings, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(quick.time, "monotonic", lambda: now_s[0])
    for _ in range(5):
        backend.beat()
        holder.sync()
        assert holder.state.participants
        assert holder.state.last_heartbeats == backend.state.last_heartbeats  # written as read
        now_s[0] += 0.9
    holder.sync()
    assert holder.state.participants
    now_s[0] += 0.2
    holder.sync()
    assert not holder.state.participants
    stock.sync()
    assert bool(stock.state.participants) == (ahead > timedelta(0))  # torch's own gives it up


def test_the_private_names_of_torch_are_there() -> None:
    for name in PRIVATE:
        assert hasattr(dynamic_rendezvous, name)
    for name in METHODS:
        owner, method = name.split(".")
        assert hasattr(getattr(dynamic_rendezvous, owner), method)


def test_without_them_the_rendezvous_is_torchs_own_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(dynamic_rendezvous, "_Action")
    monkeypatch.delitem(sys.modules, "holdfast.launch.quick")
    assert rendezvous._dynamic() == (dynamic_rendezvous.DynamicRendezvousHandler, False)
    assert "this torch's rendezvous is not known" in capsys.readouterr().err
    monkeypatch.undo()
    assert rendezvous._dynamic()[0] is importlib.import_module("holdfast.launch.quick").Quick


@pytest.mark.parametrize(("nodes", "seconds"), [(16, 0.25), (128, 2.0), (1024, 5.0)])
def test_many_hosts_send_fewer_heartbeats_but_never_fewer_than_torch(
    nodes: int, seconds: float
) -> None:
    hosts = Hosts(group=nodes)
    params = RendezvousParameters(
        rendezvous.QUICK_BACKEND, f"127.0.0.1:{hosts.store.port}", "run", nodes, nodes, is_host="0"
    )
    handler = rendezvous._create_dynamic(params)
    assert handler.settings.keep_alive_interval == timedelta(seconds=seconds)
