"""Spares: a rank that errs is named by a process beside the run, and nothing else is changed.

As a script, this file trains on ranks and is given to a spare. Arguments: a rank that errs, its
first step that does, and the step from which on each waits until a spare asks for one.
"""

import os
import socket
import subprocess
import sys
import time
from collections import UserList
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shadow_ranks import Net
from torch import nn

from holdfast import Guard, Snapshots, config, events
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.replay import Shadow
from holdfast.spare_process import SPARE_VARIABLE

STEPS, WAIT_S = 8, 20.0


class Trained:
    """A model under a Guard that offers every step: a rank's, or a spare's."""

    def __init__(self, *, ddp: bool = False) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.model = nn.parallel.DistributedDataParallel(self.net) if ddp else self.net
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        held, shadow = Snapshots(self.model, optimizer) if ddp else None, Shadow(1.0, spare=True)
        self.guard = Guard(self.model, optimizer, snapshots=held, shadow=shadow)
        self.replica: Any = self.guard.shadow

    def forward_backward(self, batch: Any) -> torch.Tensor:
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        return loss

    def step(self, batch: Any = None, *, errs: bool = False) -> None:
        """Do a step of a rank, until its offer, if a spare waits for one, is written."""
        self.net.middle.struck = "backward" * errs
        self.guard.step(self.forward_backward, batch or [torch.randn(8, 6)])
        self.replica.close(ended_well=False)


class Beside:
    """A rank and a spare, which take turns in one process."""

    def __init__(self, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        events.clear()
        self.folder, self.patch = run_dir / "spare", patch
        self.folder.mkdir(parents=True)
        patch.setenv(config.RUN_DIR_VARIABLE, str(run_dir))
        self.rank, self.spare = Trained(), Trained()
        (self.folder / "ended").touch()  # so that the spare does not wait for another step

    def offer(self, batch: Any = None, *, errs: bool = False) -> None:
        (self.folder / f"request-{socket.gethostname()}-{os.getpid()}").touch()
        self.rank.step(batch, errs=errs)

    def audit(self) -> None:
        with self.patch.context() as patch, suppress(SystemExit):
            patch.setenv(SPARE_VARIABLE, "1")
            self.spare.guard.step(self.spare.forward_backward, None)

    def both(self, *, errs: bool = False) -> None:
        self.offer(errs=errs)
        self.audit()


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beside:
    return Beside(tmp_path / "run", monkeypatch)


def named() -> list[tuple[str, int, int]]:
    return [(event.kind, event.rank, event.step) for event in events.recent()]


def test_of_clean_steps_a_spare_computes_the_same_bits_and_says_nothing(beside: Beside) -> None:
    for _ in range(STEPS):
        beside.both()
    assert beside.rank.replica.offered == beside.spare.replica._agreed == STEPS
    assert named() == []


def test_a_rank_that_errs_the_same_way_every_time_is_named_with_its_steps(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside.both()
    for _ in range(3):
        beside.offer(errs=True)
        with monkeypatch.context() as patch:  # the run goes on, so that its rank is to record it
            patch.setattr("holdfast.step.spare.record_verdicts", lambda *_: None)
            beside.audit()
    beside.rank.step()
    wrong = [("shadow_mismatch", 0, step) for step in (1, 2, 3)]
    assert named() == [*wrong[:2], ("evict", 0, 2), wrong[2]]
    first = events.recent()[0]
    assert (first.host, first.detector, first.rung) == (socket.gethostname(), "spare", "")


def test_without_a_spare_the_fault_gets_through_also_where_every_step_is_repeated(
    beside: Beside,
) -> None:
    states = []
    for errs, offers in ((False, True), (False, False), (True, False)):
        beside.rank = Trained()
        beside.rank.guard._verifier.audit = 1.0
        for _ in range(3):
            (beside.offer if offers else beside.rank.step)(errs=errs)
        states.append(state_digest(beside.rank.net.state_dict()))
    assert states[0] == states[1] != states[2]  # and an offer changes no bit
    assert named() == []


def test_a_spare_that_died_costs_one_offer_and_trouble_the_audit_and_neither_a_step(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beside.offer()
    beside.rank.step()
    beside.rank.step()
    assert (beside.rank.replica.offered, beside.rank.replica.dropped) == (1, 2)
    assert len(list(beside.folder.glob("offer-*"))) == 1
    monkeypatch.setattr(torch, "save", lambda *_: 1 // 0)
    beside.offer()
    beside.offer()
    assert beside.rank.guard.steps_done == 5
    (said,) = (record for record in caplog.records if record.name == "holdfast.spare")
    assert "dropped (said once): ZeroDivisionError" in said.getMessage()


def test_a_spare_that_may_be_wrong_names_nobody_and_one_that_errs_at_times_itself(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside.both(errs=True)
    assert named() == []  # it has agreed with no rank yet
    beside.both()
    beside.spare.net.middle.struck = "backward"  # from now on in every pass
    beside.both()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("random.Random.randrange", lambda *_: 1)
    beside.both()
    assert named() == [("shadow_mismatch", 0, 2)]  # of two ranks, neither
    compute = beside.spare.forward_backward

    def at_times(batch: Any) -> torch.Tensor:
        beside.spare.net.middle.struck = "" if beside.spare.net.middle.struck else "backward"
        return compute(batch)

    monkeypatch.setattr(beside.spare, "forward_backward", at_times)
    beside.offer(errs=True)
    with pytest.raises(UncorrectableFault, match="with other bits each time: its device errs"):
        beside.audit()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("model", r"they differ: .*\('last.bias', 'torch.Size\(\[2\]\)'\)"),
        ("settings", r"they differ: .*'DNNL_MAX_CPU_ISA', 'another'"),
        ("batch", "(?s)cannot read the step in .*UserList"),
        ("disk", "changed since a rank wrote it"),
    ],
)
def test_what_a_spare_cannot_compute_it_refuses(
    case: str, said: str, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = beside.rank.net.up.bias.detach().numpy().tobytes()
    beside.offer(UserList([torch.randn(8, 6)]) if case == "batch" else None)
    (path,) = beside.folder.glob("offer-*")
    if case == "model":
        beside.spare.net.last = nn.Linear(6, 3)
    if case == "settings":
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", "another")
    if case == "disk":
        path.write_bytes(path.read_bytes().replace(bias, bytes(len(bias))))
    with pytest.raises(ConfigError, match=said):
        beside.audit()
    assert not path.exists()


def test_what_cannot_be_offered_is_refused(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="leave out mesh, unit and groups"):
        Shadow(0.1, spare=True, unit=("dp",))
    model = nn.SyncBatchNorm(2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="SyncBatchNorm"):
        Guard(model, optimizer, shadow=Shadow(0.1, spare=True))
    with pytest.raises(ConfigError, match="none of micro_step"):
        beside.rank.guard.micro_step(lambda batch: batch, None, last=True)
    monkeypatch.setenv(SPARE_VARIABLE, "1")
    with pytest.raises(ConfigError, match="a spare's Guard needs"):
        Guard(model, optimizer)


def start(run_dir: Path, words: list[str], rank: int = 0, port: int = 0) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {config.RUN_DIR_VARIABLE: run_dir}
    env, pipe = os.environ | {n: str(value) for n, value in place.items()}, subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(("wrong", "late"), [("-1", "0"), ("1", "2")])
def test_of_two_ranks_under_ddp_only_the_wrong_one_is_named_also_by_a_late_spare(
    wrong: str, late: str, run_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    script = [__file__, wrong, "4", late]
    ranks = [start(run_dir, script, rank, port) for rank in range(2)]
    assert "waits\n" in iter(ranks[0].stdout.readline, "")
    spare = start(run_dir, ["-m", "holdfast.cli.main", "spare", *script])
    said = [process.communicate(timeout=60) for process in (*ranks, spare)]
    assert [process.returncode for process in (*ranks, spare)] == [0, 0, 0], said
    assert sum(int(out.split()[-1]) for out, _ in said[:2]) == STEPS - int(late)
    ledger = events.read_ledger(run_dir / events.LEDGER_NAME, kind="shadow_mismatch")
    found = {(event.rank, event.step >= 4) for _, event in ledger}
    assert found == ({(1, True)} if wrong == "1" else set())
    assert not any((run_dir / "spare").glob("*-*"))


def script(wrong: int, first: int, paced: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, until_s = Path(os.environ["HOLDFAST_RUN_DIR"], "spare"), time.monotonic() + WAIT_S
    trained = Trained(ddp=True)
    torch.manual_seed(dist.get_rank())
    with trained.guard:
        for step in range(STEPS):
            waits = dist.get_world_size() > 1 and step >= paced
            print("waits" * waits, flush=True)
            while waits and not any(folder.glob("request-*")) and time.monotonic() < until_s:
                time.sleep(0.005)
            dist.barrier()  # before a rank takes the request
            trained.step(errs=dist.get_rank() == wrong and step >= first)
        print(trained.replica.offered)
    dist.destroy_process_group()


if __name__ == "__main__":
    script(*map(int, sys.argv[1:]))
