"""The Guard: the bare loop's bits on healthy hardware, and the ladder when it is not."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from holdfast import config, events
from holdfast.digest import state_digest
from holdfast.errors import ConfigError, SnapshotCorrupt, SnapshotLost, UncorrectableFault
from holdfast.guard import Guard
from holdfast.inject import Fault, Injector
from holdfast.protection import protect
from holdfast.replay.history import History
from holdfast.snapshot import launch, layout, restore
from holdfast.snapshot.client import Snapshots

STEPS = 20
STRUCK = 12  # after the spike detector's warm-up
PATIENCE_S = 20.0


class Net(nn.Module):
    """Two linear layers with all that a repetition has to put back: buffers and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.batch_norm(self.up(x)))
        return self.down(self.norm(hidden))


class Batches:
    """An endless loader that can be resumed; batch ``n`` is the same whenever it is asked for."""

    def __init__(self, special: dict[int, torch.Tensor] | None = None) -> None:
        self.position = 0
        self.special = special or {}

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, torch.Tensor]:
        self.position += 1
        return self.position - 1, self.batch(self.position - 1)

    def batch(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return self.special.get(number, torch.randn(6, 8, generator=generator))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Run:
    """A small training run; ``computed`` lists the batches that passes were made of."""

    def __init__(self, *, dropout: float = 0.5, special: dict[int, torch.Tensor] | None = None):
        torch.manual_seed(0)
        random.seed(0)
        self.model = Net(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = Batches(special)
        self.computed: list[int] = []
        self.injector = Injector(self.model, [], rank=0)
        self.damage: Callable[[int], None] = lambda step: None

    def inject(self, *faults: Fault) -> "Run":
        self.injector = Injector(self.model, faults, rank=0)
        return self

    def forward_backward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        self.computed.append(number)
        with self.injector.step(events.current_step()):
            loss = self.model(inputs).square().mean() + 0.1
            loss.backward()
        self.damage(number)
        return loss

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "Run":
        for number, batch in enumerate(islice(self.loader, steps)):
            events.set_step(number)
            self.optimizer.zero_grad()
            self.forward_backward(batch)
            if clip is not None:
                clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def guarded(self, steps: int = STEPS, clip: float | None = None, **options: Any) -> Guard:
        if "snapshots" not in options:
            options["scheduler"] = self.scheduler
        guard = Guard(self.model, self.optimizer, clip_grad_norm=clip, **options)
        with guard:
            for batch in guard.batches(self.loader, steps=steps):
                guard.step(self.forward_backward, batch)
        return guard

    def digest(self) -> str:
        parts = [self.model, self.optimizer, self.scheduler]
        return state_digest([part.state_dict() for part in parts])


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(PATIENCE_S))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    launch.stop_smp(path)


def _snapshots(run: Run, run_dir: Path, **options: Any) -> Snapshots:
    return Snapshots(
        run.model,
        run.optimizer,
        scheduler=run.scheduler,
        loader=run.loader,
        run_dir=run_dir,
        **options,
    )


def _kinds() -> list[str]:
    return [event.kind for event in events.recent()]


def _of(kind: str) -> list[events.Event]:
    return [event for event in events.recent() if event.kind == kind]


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("audit", [0.0, 0.3, 1.0])
def test_a_healthy_run_is_the_bare_loop_bit_for_bit(
    clip: float | None, dropout: float, audit: float
) -> None:
    bare, guarded = Run(dropout=dropout).bare(clip=clip), Run(dropout=dropout)
    before = guarded.digest()
    with protect(guarded.model):
        guard = guarded.guarded(clip=clip, audit=audit)
    assert guarded.digest() == bare.digest() != before
    assert guard.steps_done == STEPS
    assert _kinds() == []
    repeated = len(guarded.computed) - STEPS
    assert repeated == (STEPS if audit == 1 else 0) or 0 < audit < 1
    assert 0 <= repeated <= STEPS


def test_clipping_matters_in_these_runs() -> None:
    assert Run().bare(clip=0.05).digest() != Run().bare().digest() == Run().bare(clip=1e6).digest()


def test_snapshots_every_step_change_nothing(run_dir: Path) -> None:
    bare, guarded = Run().bare(clip=0.05), Run()
    guarded.guarded(clip=0.05, snapshots=_snapshots(guarded, run_dir))
    assert guarded.digest() == bare.digest()
    assert _kinds() == []


def _module_fault(step: int = STRUCK) -> Fault:
    return Fault(step, 0, "bitflip", site="module", op="norm", bit=30)


def test_a_module_fault_is_recomputed() -> None:
    right = Run().bare().digest()
    assert Run().inject(_module_fault()).bare().digest() != right
    events.clear()
    run = Run().inject(_module_fault())
    with protect(run.model):
        run.guarded()
    assert run.digest() == right
    (event,) = _of("rerun")
    assert (event.step, event.rung, event.detail["verdict"]) == (STRUCK, "recompute", "transient")
    assert run.computed.count(STRUCK) == 3


LOW_FLIP = Fault(STRUCK, 0, "bitflip", op="up/addmm/forward", bit=3, index=(1, 1))


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_only_a_full_audit_repairs_a_low_flip(audit: float) -> None:
    right = Run().bare().digest()
    run = Run().inject(LOW_FLIP)
    with protect(run.model):
        run.guarded(audit=audit)
    assert len(_of("injected")) == 1
    assert (run.digest() == right) == (audit == 1.0)
    assert [event.detector for event in _of("rerun")] == (["audit"] if audit else [])


class StrikesOnce:
    """Flips a gradient's low bit in one chosen pass of a step."""

    def __init__(self, run: Run, attempt: int) -> None:
        self.run, self.attempt = run, attempt

    def __call__(self, number: int) -> None:
        if number == STRUCK and self.run.computed.count(STRUCK) == self.attempt:
            self.run.model.up.weight.grad.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize(("attempt", "verdict"), [(1, "transient"), (2, "genuine")])
def test_an_audit_reports_a_fault_in_either_pass(attempt: int, verdict: str) -> None:
    run = Run()
    run.damage = StrikesOnce(run, attempt)
    run.guarded(audit=1.0)
    assert run.digest() == Run().bare().digest()
    (event,) = _of("rerun")
    assert (event.detail["verdict"], event.rung, event.step) == (verdict, "recompute", STRUCK)


WEIGHT_FAULT = Fault(STRUCK, 0, "bitflip", site="operand", op="up/addmm/forward", bit=30)


def test_a_damaged_weight_is_rolled_back(run_dir: Path) -> None:
    right = Run().bare().digest()
    damaged = Run().inject(WEIGHT_FAULT)
    with protect(damaged.model, verify=False):
        assert damaged.bare().digest() != right
    events.clear()
    run = Run().inject(WEIGHT_FAULT)
    with protect(run.model):
        run.guarded(snapshots=_snapshots(run, run_dir))
    assert run.digest() == right
    (event,) = _of("rollback")
    assert (event.step, event.rung) == (STRUCK, "rollback")
    assert event.detail["from_step"] == STRUCK > event.detail["to_step"] >= STRUCK - 2
    assert run.loader.position == STEPS


def test_without_snapshots_a_damaged_weight_stops_the_run() -> None:
    run = Run().inject(WEIGHT_FAULT)
    steps_applied = Run().bare(STRUCK).scheduler.state_dict()
    with protect(run.model), pytest.raises(UncorrectableFault, match=f"step {STRUCK}: .*no snap"):
        run.guarded()
    assert run.scheduler.state_dict() == steps_applied
    assert [event.detail["verdict"] for event in _of("rerun")] == ["persistent"]


@pytest.mark.parametrize("step", [0, 1])
def test_the_first_steps_can_be_rolled_back_too(run_dir: Path, step: int) -> None:
    fault = Fault(step, 0, "bitflip", site="operand", op="up/addmm/forward", bit=30)
    run = Run().inject(fault)
    with protect(run.model):
        run.guarded(6, snapshots=_snapshots(run, run_dir))
    assert run.digest() == Run().bare(6).digest()
    assert [event.detail["to_step"] for event in _of("rollback")] == [0]


def _always_wrong(run: Run, at: int) -> Callable[[int], None]:
    draw = random.Random(7)

    def damage(number: int) -> None:
        if number == at:
            run.model.up.weight.grad[0, 0] = draw.random() * 1e6

    return damage


@pytest.mark.parametrize("held", [False, True])
def test_a_fault_in_every_attempt_never_reaches_the_optimizer(run_dir: Path, held: bool) -> None:
    run = Run()
    run.damage = _always_wrong(run, STRUCK)
    with pytest.raises(UncorrectableFault, match=f"step {STRUCK}: 4 runs gave no confirmed") as at:
        run.guarded(**({"snapshots": _snapshots(run, run_dir)} if held else {}))
    assert ("after 2 roll-backs" in str(at.value)) == held
    clean = Run().bare(STRUCK)
    parameters = [p.tolist() for p in clean.model.parameters()]
    assert [p.tolist() for p in run.model.parameters()] == parameters
    assert state_digest(run.optimizer.state_dict()) == state_digest(clean.optimizer.state_dict())
    assert len(_of("rollback")) == (2 if held else 0)
    assert run.computed.count(STRUCK) == 4 * (3 if held else 1)


@pytest.mark.parametrize("held", [False, True])
def test_a_genuine_nan_batch_ends_as_in_the_bare_loop(run_dir: Path, held: bool) -> None:
    nan = {5: torch.full((6, 8), math.nan)}
    bare, run = Run(special=nan).bare(7), Run(special=nan)
    with protect(run.model):
        run.guarded(7, **({"snapshots": _snapshots(run, run_dir)} if held else {}))
    assert run.digest() == bare.digest()
    assert {event.step for event in _of("nonfinite_genuine")} == {5, 6}
    assert all(event.detail["verdict"] == "genuine" for event in _of("rerun"))


def test_a_transient_nan_is_not_genuine() -> None:
    run = Run()
    run.damage = lambda number: (
        run.model.up.weight.grad.fill_(math.nan) if run.computed.count(3) == 1 == number - 2 else 0
    )
    run.guarded(6)
    assert run.digest() == Run().bare(6).digest()
    assert _kinds() == ["rerun"]
    assert _of("rerun")[0].detector == "non-finite value"


def test_a_huge_but_genuine_batch_is_applied() -> None:
    huge = {STRUCK: 1e4 * torch.ones(6, 8).cumsum(1).cumsum(0)}
    bare, run = Run(special=huge, dropout=0), Run(special=huge, dropout=0)
    for each in (bare, run):
        each.model.norm = each.model.batch_norm = nn.Identity()
        each.optimizer = torch.optim.AdamW(each.model.parameters(), lr=1e-2)
        each.scheduler = torch.optim.lr_scheduler.StepLR(each.optimizer, 3)
    run.guarded()
    assert run.digest() == bare.bare().digest()
    (event,) = _of("rerun")
    assert (event.detector, event.step) == ("loss spike", STRUCK)
    assert (event.detail["verdict"], event.rung) == ("genuine", "")


def test_gradients_accumulate_over_micro_batches() -> None:
    def accumulate(run: Run) -> Callable[[tuple[int, torch.Tensor]], torch.Tensor]:
        def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(())
            for part in batch[1].chunk(3):
                loss = run.model(part).square().mean() / 3
                loss.backward()
                total += loss.detach()
            return total

        return forward_backward

    bare = Run()
    for batch in islice(bare.loader, 6):
        bare.optimizer.zero_grad()
        accumulate(bare)(batch)
        bare.optimizer.step()
    run = Run()
    guard = Guard(run.model, run.optimizer, audit=1.0)
    for batch in guard.batches(run.loader, steps=6):
        guard.step(accumulate(run), batch)
    assert run.digest() == bare.digest()
    assert _kinds() == []


def test_a_float_instead_of_the_loss_is_refused() -> None:
    run = Run()
    with pytest.raises(TypeError, match="returned float"):
        Guard(run.model, run.optimizer).step(lambda batch: 0.5, None)


def test_what_forward_backward_raises_gets_out_and_the_step_can_be_tried_again() -> None:
    run, broken = Run(dropout=0.0), [True]
    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler)

    def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == 3 and broken.pop():
            raise RuntimeError("out of memory")
        return run.forward_backward(batch)

    for number in range(6):
        batch = number, run.loader.batch(number)
        if number == 3:
            with pytest.raises(RuntimeError, match="out of memory"):
                guard.step(forward_backward, batch)
            broken.append(False)
            assert guard.steps_done == 3
            batch = number, run.loader.batch(number)
        guard.step(forward_backward, batch)
    assert run.digest() == Run(dropout=0.0).bare(6).digest()


def test_a_step_given_up_by_the_caller_is_not_done_with_its_batch_later() -> None:
    run = Run()
    guard = Guard(run.model, run.optimizer)
    with pytest.raises(TypeError):
        guard.step(lambda batch: None, (99, run.loader.batch(99)))
    guard.step(run.forward_backward, (0, run.loader.batch(0)))
    assert run.computed == [0]


class Plain:
    """A loader without a position, of few batches; counts how often it is begun."""

    def __init__(self, length: int) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        self.begun += 1
        torch.rand(1)  # as torch's DataLoader does for its workers' seed
        yield from ((number, Batches().batch(number)) for number in range(self.length))


def _train_plain(
    run: Run, loader: Plain, steps: int, snapshots: Snapshots | None = None, until: int = -1
) -> None:
    """Train without a schedule; interrupted once step ``until`` is in a clean snapshot."""
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(loader, steps=steps):
            guard.step(run.forward_backward, batch)
            if guard.steps_done == until and snapshots is not None:
                snapshots.wait_committed()
                raise KeyboardInterrupt


def test_a_short_loader_is_cycled() -> None:
    run, loader = Run(), Plain(3)
    _train_plain(run, loader, 8)
    assert run.computed == [0, 1, 2, 0, 1, 2, 0, 1]
    assert loader.begun == 3


@pytest.mark.parametrize("loader", [[], Plain(0), iter(())])
def test_an_empty_loader_is_refused(loader: Any) -> None:
    run = Run()
    with pytest.raises(ConfigError, match=r"yields no batch at step 0 of 5: give"):
        list(Guard(run.model, run.optimizer).batches(loader, steps=5))


@pytest.mark.parametrize("interrupted", [2, 3, 4])
def test_after_a_restart_a_loader_without_position_is_fast_forwarded(
    run_dir: Path, interrupted: int
) -> None:
    whole = Run()
    _train_plain(whole, Plain(3), 8)
    first, second = Run(), Run()
    snapshots = Snapshots(first.model, first.optimizer, run_dir=run_dir)
    with pytest.raises(KeyboardInterrupt):
        _train_plain(first, Plain(3), 8, snapshots, until=interrupted)
    torch.manual_seed(99)
    snapshots = Snapshots(second.model, second.optimizer, run_dir=run_dir)
    _train_plain(second, Plain(3), 8, snapshots)
    assert first.computed + second.computed == whole.computed
    assert second.digest() == whole.digest()


def _interruption(due: Callable[[int], bool]) -> Callable[[int], None]:
    def damage(number: int) -> None:
        if due(number):
            raise KeyboardInterrupt

    return damage


def test_a_restart_resumes_an_owned_loader_where_it_stood(run_dir: Path) -> None:
    first, second = Run(), Run()
    first.damage = _interruption(lambda number: number == 7)
    with pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=_snapshots(first, run_dir))
    second.guarded(snapshots=_snapshots(second, run_dir))
    assert second.computed[0] in (5, 6, 7)
    assert second.computed == list(range(second.computed[0], STEPS))
    assert second.digest() == Run().bare().digest()
    assert second.loader.position == STEPS


@pytest.mark.parametrize("every", [1, 3])
def test_a_roll_back_replays_the_batches_since_the_snapshot(run_dir: Path, every: int) -> None:
    run = Run().inject(WEIGHT_FAULT)
    with protect(run.model):
        run.guarded(snapshots=_snapshots(run, run_dir, every=every))
    assert run.digest() == Run().bare().digest()
    back = _of("rollback")[0].detail["to_step"]
    assert back % every == 0
    doubted = [STRUCK] * 4
    assert run.computed == [*range(STRUCK), *doubted, *range(back, STEPS)]


def test_a_roll_back_over_the_start_of_an_epoch_keeps_the_random_numbers(run_dir: Path) -> None:
    whole = Run()
    _train_plain(whole, Plain(3), STEPS)
    run = Run().inject(WEIGHT_FAULT)
    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir)
    with protect(run.model):
        _train_plain(run, Plain(3), STEPS, snapshots)
    assert STRUCK % 3 == 0
    assert _of("rollback")[0].detail["to_step"] < STRUCK
    assert run.digest() == whole.digest()


@pytest.mark.parametrize("died_at", [STRUCK, STRUCK + 1, STRUCK + 2])
def test_a_death_right_after_a_roll_back_loses_no_batch(run_dir: Path, died_at: int) -> None:
    first, second = Run().inject(WEIGHT_FAULT), Run()
    first.damage = _interruption(lambda number: number == died_at and bool(_of("rollback")))
    with protect(first.model), pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=_snapshots(first, run_dir))
    assert first.computed[-1] == died_at
    second.guarded(snapshots=_snapshots(second, run_dir))
    assert second.computed == list(range(second.computed[0], STEPS))
    assert second.digest() == Run().bare().digest()


def test_a_corrupt_snapshot_is_passed_over_for_an_older_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, offered = restore._verified, []

    def damaged(offer: Any, training: Any) -> Any:
        offered.append(offer.step)
        if len(offered) == 1:
            raise SnapshotCorrupt("a bit of model.up.weight flipped")
        return original(offer, training)

    monkeypatch.setattr(restore, "_verified", damaged)
    run = Run().inject(WEIGHT_FAULT)
    snapshots = _snapshots(run, run_dir)
    with protect(run.model), Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            snapshots.wait_committed()
            guard.step(run.forward_backward, batch)
    assert offered == [STRUCK, STRUCK - 1]
    assert _of("rollback")[0].detail["to_step"] == STRUCK - 1
    assert len(_of("snapshot_corrupt")) == 1
    assert run.digest() == Run().bare().digest()
    assert run.loader.position == STEPS


def test_a_roll_back_further_than_the_batches_reach_is_an_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.damage = _always_wrong(run, 6)
    monkeypatch.setattr(History, "since", lambda history, step: history._steps[-1:][step < 6 :])
    with pytest.raises(UncorrectableFault, match=r"rolled back to step \d, .*forgotten"):
        run.guarded(snapshots=_snapshots(run, run_dir))


def test_snapshots_need_a_with_block(run_dir: Path) -> None:
    run = Run()
    snapshots = _snapshots(run, run_dir)
    with pytest.raises(ConfigError, match="use it in a with block"):
        Guard(run.model, run.optimizer, snapshots=snapshots).step(run.forward_backward, None)
    snapshots.close(finished=True)


def test_a_scheduler_that_snapshots_do_not_hold_is_refused(run_dir: Path) -> None:
    run = Run()
    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir)
    with pytest.raises(ConfigError, match=r"StepLR is not the one .*Snapshots\(scheduler"):
        Guard(run.model, run.optimizer, scheduler=run.scheduler, snapshots=snapshots)
    snapshots.close(finished=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audit": -0.1}, r"audit = -0\.1 must be"),
        ({"audit": 1.5}, r"audit = 1\.5 must be"),
        ({"audit": math.nan}, "audit = nan must be"),
        ({"clip_grad_norm": 0.0}, r"clip_grad_norm = 0\.0 must be"),
        ({"clip_grad_norm": -1.0}, r"clip_grad_norm = -1\.0 must be"),
        ({"clip_grad_norm": math.nan}, "clip_grad_norm = nan must be"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    run = Run()
    with pytest.raises(ConfigError, match=message):
        Guard(run.model, run.optimizer, **options)


def test_the_audited_share_is_about_what_was_asked_and_the_same_on_all_ranks() -> None:
    run = Run()
    chosen = [
        [step for step in range(2000) if Guard(run.model, run.optimizer, **o)._is_audited(step)]
        for o in ({"audit": 0.25}, {"audit": 0.25}, {"audit": 0.25, "seed": 1})
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 400 < len(chosen[0]) < 600


def test_a_state_that_cannot_be_stored_is_named(run_dir: Path) -> None:
    run = Run()
    run.optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(ConfigError, match=r"'optimizer\.param_groups\.0\.hook' is a <object>"):
        run.guarded(snapshots=_snapshots(run, run_dir))


def test_snapshots_that_do_not_fit_in_memory_are_refused_at_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "total_bytes", lambda entries: 2**52)
    run = Run()
    with pytest.raises(ConfigError, match=rf"needs {2**52} bytes and \d+ are available .*lower"):
        run.guarded(snapshots=_snapshots(run, run_dir))
    assert run.computed == []


def test_a_schedule_of_a_lambda_is_stored(run_dir: Path) -> None:
    run = Run()
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 0.5**epoch)
    run.guarded(4, snapshots=_snapshots(run, run_dir))
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)


@pytest.mark.parametrize("protected", [False, True])
def test_a_model_without_matmuls_is_guarded_all_the_same(protected: bool) -> None:
    model = nn.PReLU(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    with protect(model) if protected else nullcontext() as protection:
        Guard(model, optimizer, audit=1.0).step(forward_backward, -torch.ones(2, 3))
        if protection is not None:
            assert "0 of 0 matmul sites covered" in str(protection.report())
    assert model.weight.tolist() != [0.25] * 3


class Interrupted(Exception):
    """Stands for the death of the trainer."""


def _train_shuffled(run_dir: Path, *, die_at: int | None = None) -> str:
    """Two and a half passes of a shuffling DataLoader, which has no position of its own."""
    torch.manual_seed(3)
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, batch_size=6, shuffle=True)
    run = Run()
    snapshots = Snapshots(run.model, run.optimizer, scheduler=run.scheduler, run_dir=run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(loader, steps=10):
            if guard.steps_done == die_at:
                snapshots.wait_committed()
                raise Interrupted
            guard.step(lambda inputs: run.forward_backward((0, inputs)), batch)
    return run.digest()


@pytest.mark.processes
@pytest.mark.parametrize("die_at", [1, 4, 6])
def test_a_shuffling_loader_is_resumed_in_the_same_order(tmp_path: Path, die_at: int) -> None:
    undisturbed = _train_shuffled(tmp_path / "undisturbed")
    with pytest.raises(Interrupted):
        _train_shuffled(tmp_path / "run", die_at=die_at)
    random.seed(99)
    assert _train_shuffled(tmp_path / "run") == undisturbed
    assert _of("restored")


def test_parameters_that_the_model_does_not_hold_are_refused() -> None:
    run = Run()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="not the model's"):
        Guard(run.model, run.optimizer)


@pytest.mark.processes
@pytest.mark.parametrize("elements", [1, 5])
def test_a_weight_damaged_within_a_step_is_rolled_back(run_dir: Path, elements: int) -> None:
    """Contiguous bytes of a weight are many rows of the B that its forward product takes."""
    clean, run = Run(dropout=0), Run(dropout=0)
    for each in (clean, run):  # the additional pass must leave no trace in the running statistics
        each.model.batch_norm = nn.Identity()
        each.optimizer = torch.optim.AdamW(each.model.parameters(), lr=1e-2)
        each.scheduler = torch.optim.lr_scheduler.StepLR(each.optimizer, 3)
    plain_pass, struck = run.forward_backward, []

    def struck_pass(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == STRUCK and not struck:
            with torch.no_grad():
                run.model(batch[1])  # the weight is encoded, then damaged
            struck.append(batch[0])
            run.model.up.weight.data.flatten()[:elements] = 1e6
        return plain_pass(batch)

    run.forward_backward = struck_pass  # type: ignore[method-assign]
    with protect(run.model):
        run.guarded(snapshots=_snapshots(run, run_dir))
    assert "operand_fault" in _kinds()
    assert "rollback" in _kinds()
    assert "weight_changed_unseen" not in _kinds()
    assert run.digest() == clean.bare().digest()


@pytest.mark.processes
def test_nodes_that_restored_different_steps_do_not_train_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    guard = Guard(run.model, run.optimizer, snapshots=_snapshots(run, run_dir))
    monkeypatch.setattr(guard, "_agree", lambda wish: max(wish, 5))  # another node is at step 5
    with pytest.raises(SnapshotLost, match="restored step 0, others up to 5"):
        guard.__enter__()
    guard.__exit__(SnapshotLost, None, None)


@pytest.mark.processes
def test_the_guard_keeps_its_events_in_the_run_directory(run_dir: Path) -> None:
    run = Run(special={5: torch.full((6, 8), math.nan)})
    run.guarded(7, snapshots=_snapshots(run, run_dir))
    events.close_ledger()
    stored = [event.kind for _, event in events.read_ledger(run_dir / events.LEDGER_NAME)]
    assert "nonfinite_genuine" in stored
