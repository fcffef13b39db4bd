"""Shadow replicas: another rank computes a rank's micro-step too, and digests are compared.

A device that errs the same way every time agrees with itself: no repetition on it finds anything.
In an audited step each unit (``units``) also computes another unit's micro-batch, from that one's
random state and buffers, with the same parameters; digests of loss, local gradients and buffers are
compared before the reduced gradient is applied. Where they differ a third unit computes it too, and
the majority says who was wrong.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import ConfigError
from holdfast.replay.accused import Accused
from holdfast.replay.gradients import (
    LocalGradients,
    Start,
    Values,
    local_gradients,
    put_buffers,
    set_aside,
    unreduced,
)
from holdfast.replay.majority import Digests, Judgement, Run, is_sampled, judge, part_for, schedule
from holdfast.replay.passes import GroupPass, GroupStep, Pass, arrived, device_of, travelling
from holdfast.replay.rerun import MicroStep, Unconfirmed
from holdfast.replay.units import Channel, units_of

MAX_REDONE = 3  # passes with the right gradients in place, until one is right on all ranks

Attempt = Callable[[MicroStep], tuple[torch.Tensor, bool]]


@dataclass(frozen=True)
class Shadow:
    """How ranks are audited by each other; ``Guard(shadow=0.01)`` is ``Shadow(0.01)``.

    Args:
        rate: share of steps, 0 to 1, in which every unit is computed by another one too.
        mesh: the ``DeviceMesh`` of the whole job, where ranks compute one gradient together.
        unit: names of its dimensions along which they do; None: all but data-parallel ones.
        groups: micro-batches of a step, if one of them is to be audited instead of all.
        group_step: ``group_step(batch, group)`` computes one of them as ``forward_backward`` does:
            calls the model once, ``backward()``, returns its loss; draws no random number before it
            calls the model.
        until_evicted: audit every step once a unit is known to err persistently, so that what it
            computes is not applied until it is replaced.

    Raises:
        ConfigError: a rate or number of groups is out of range, or groups come without their step.
    """

    rate: float
    mesh: Any = None
    unit: tuple[str, ...] | None = None
    groups: int = 1
    group_step: GroupStep | None = None
    until_evicted: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"shadow = {self.rate!r} must be a share of steps between 0 and 1")
        if self.groups < 1 or (self.groups > 1) != (self.group_step is not None):
            raise ConfigError(
                f"groups = {self.groups} and group_step = {self.group_step!r}: to audit one of "
                "several micro-batches give their number, and what computes one; else neither"
            )


class ShadowReplica:
    """One rank's part in the audits of a ``Guard``; made by all ranks together.

    Args:
        model: as it is called; DDP, FSDP2, tensor-parallel or plain.
        settings: of the audits; rate 0 does nothing at all.
        seed: chooses steps, shadows and groups; the same on all ranks.
        attempt: runs a micro-step; its loss, and whether a fault was found and not repaired.

    Attributes:
        units: the ranks of each unit; accused: which of them were wrong so far.

    Guarantees: in an audited step, a wrong local gradient, loss or buffer of one unit, of any size
    and repeated or not, is replaced by what two others computed, bit for bit, before it is reduced
    and applied, and its ranks are named; healthy programs are never accused. With two units a
    fault is settled if repetition shows one side right; else the step is not confirmed.
    Not covered: parameters and optimizer (compared by nobody), the reduction itself, faults that
    strike two units alike, programs that are not deterministic across ranks (other devices, other
    numbers of threads) or whose ``forward_backward`` communicates beyond its wrapper.

    Source: Ma et al. (2025), section 7 (a shadow data-parallel replica). Ours: every rank is the
    shadow of another at once, as all would wait for the one; the majority; the correction.

    Raises:
        ConfigError: there is one unit only, or normalisation over ranks.
    """

    def __init__(self, model: nn.Module, settings: Shadow, seed: int, attempt: Attempt) -> None:
        self.settings, self.seed = settings, seed
        self._model, self._attempt = model, attempt
        self._due, self._right, self._own = False, None, None
        self.units: list[tuple[int, ...]] = []
        self.accused = Accused((), 0, ())
        if not settings.rate:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("a shadow needs several ranks: call init_process_group first")
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise ConfigError("SyncBatchNorm mixes ranks' batches: no rank can be computed alone")
        self.units = units_of(model, settings.mesh, settings.unit)
        if len(self.units) < 2:
            raise ConfigError(
                f"shadow = {settings.rate}: all ranks are one unit {self.units}, and a shadow is "
                "another replica; three are needed to tell which of them is wrong"
            )
        self._channel = Channel(device_of(model))
        where = [unit for unit in self.units if self._channel.rank in unit]
        self._unit = self.units.index(where[0])
        self._place = where[0].index(self._channel.rank)
        self.accused = Accused(self.units, self._channel.rank, self._channel.places)
        self._kept: dict[int, Pass] = {}

    _right: tuple[Values, torch.Tensor, list[torch.Tensor]] | None
    _own: Pass | None

    def begin(self, step: int) -> None:
        """A step begins: from here ``observe`` looks if it is audited."""
        self._step, self._own, self._right = step, None, None
        sampled = is_sampled(self.settings.rate, self.seed, step)
        self._due = sampled or (self.settings.until_evicted and bool(self.accused.evicted))

    def insist(self) -> bool:
        """Audit the present step whatever was drawn, if it can be: it is in doubt, on all ranks."""
        self._due = bool(self.settings.rate)
        return self._due

    def observe(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run this rank's own pass; in an audited step its local gradients are seen."""
        if not self._due:
            return run()
        right = self._right[0] if self._right else None
        with local_gradients(self._model, right=right) as local:
            loss = run()
        self._own = self._seen(loss, local, faulty=False)
        if self._right:
            loss = self._right[1]
            put_buffers(self._model, self._right[2])
        return loss

    def confirmed(
        self,
        step: MicroStep,
        loss: torch.Tensor,
        redo: Callable[[], torch.Tensor],
        *,
        faulty: bool = False,
    ) -> torch.Tensor:
        """The loss that counts; the gradients in place are those that count.

        Args:
            step: this rank's, whose gradients are in place.
            loss: what it came to.
            redo: runs it again through ``observe``; called on all ranks if one of them was wrong.
            faulty: a fault was found in it and not repaired: it is no witness.

        Raises:
            Unconfirmed: there is no majority for some unit's outcome.
        """
        if not self._due:
            return loss
        started_s = time.perf_counter()
        if self._own is None:  # asked for after it had run
            loss = redo()
        assert self._own is not None
        own = self._gathered(self._own.digests(self.settings.groups), faulty=faulty)
        runs = [Run(unit, unit, outcome, faulty=bad) for unit, (bad, outcome) in enumerate(own)]
        with set_aside(self._model):
            judged = self._rounds(step, runs)
        wrong = [run.target for run in judged.wrong if run.by == run.target and run in runs]
        try:
            if wrong and not judged.undecided:
                loss = self._corrected(judged, wrong, redo)
        finally:
            self.accused.take(judged, started_s)
            self._kept.clear()
        if judged.undecided:
            ranks = [list(self.units[unit]) for unit in judged.undecided]
            raise Unconfirmed(f"shadows and ranks {ranks} differ, and no majority says who errs")
        return loss

    def _rounds(self, step: MicroStep, own: list[Run]) -> Judgement:
        """Passes for others until every unit's outcome has a majority, or there were enough."""
        shifts = schedule(len(self.units), self.seed, self._step)
        runs = list(own)
        escalated = self.settings.groups > 1
        if escalated:
            part = part_for(self.settings.groups, self.seed, self._step)
            found = self._round(step, shifts[0], part=part, keep=False)
            parts = {run.target: tuple((one[1 + part],) for one in run.outcome) for run in own}
            if all(not run.faulty and run.outcome == parts[run.target] for run in found):
                return Judgement({}, (), ())
            runs += found
        for number, shift in enumerate(shifts):
            runs += self._round(step, shift, part=None, keep=escalated or number > 0)
            judged = judge(runs)
            if not judged.undecided:
                break
        return judged

    def _round(self, step: MicroStep, shift: int, *, part: int | None, keep: bool) -> list[Run]:
        """Every unit makes one pass for the unit that is ``shift`` further on."""
        units = len(self.units)
        target = (self._unit + shift) % units
        asking = self.units[(self._unit - shift) % units][self._place]
        start = self._start(step, part)
        mine = (step.batch, travelling(start.rng, self._channel.device), start.buffers)
        other = self.units[target][self._place]
        batch, rng, buffers = self._channel.rotate(mine, to=asking, source=other)
        begin = Start(arrived(rng, self._channel.device), buffers)
        group_step = self.settings.group_step
        chosen = None if part is None or group_step is None else GroupPass(group_step, part)
        found = self._alone(step.elsewhere(batch, begin, chosen), keep=keep)
        if keep:
            self._kept[target] = found
        one = found.local.of_group(0)
        digests = (one,) if part is not None else found.digests(self.settings.groups)
        gathered = self._gathered(digests, faulty=found.faulty)
        return [
            Run((unit + shift) % units, unit, outcome, part, faulty)
            for unit, (faulty, outcome) in enumerate(gathered)
        ]

    def _start(self, step: MicroStep, part: int | None) -> Start:
        """What a pass begins with, after DDP has given the ranks one set of buffers."""
        assert self._own is not None
        starts = self._own.local.starts
        if part is None:
            return Start(step.start.rng, starts[0].buffers if starts else step.start.buffers)
        if len(starts) != self.settings.groups:
            raise ConfigError(
                f"groups = {self.settings.groups}: the step called the model {len(starts)} times"
            )
        return starts[part]

    def _alone(self, step: MicroStep, *, keep: bool) -> Pass:
        with local_gradients(self._model, keep=keep) as local, unreduced(self._model):
            loss, faulty = self._attempt(step)
        return self._seen(loss, local, faulty=faulty)

    def _seen(self, loss: torch.Tensor, local: LocalGradients, *, faulty: bool) -> Pass:
        buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        return Pass(loss.detach(), local, buffers, faulty)

    def _gathered(self, mine: Digests, *, faulty: bool) -> list[tuple[bool, tuple[Digests, ...]]]:
        """By unit: whether any of its ranks met a fault, and what its ranks came to."""
        every = self._channel.digests(mine, flag=faulty)
        return [
            (any(every[rank][0] for rank in unit), tuple(every[rank][1] for rank in unit))
            for unit in self.units
        ]

    def _corrected(
        self, judged: Judgement, wrong: list[int], redo: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Do the step again, with the right local gradients in the place of the wrong ones."""
        for target in wrong:
            self._supply(judged, target)
        for _ in range(MAX_REDONE):
            loss = redo()
            assert self._own is not None
            own = self._own.digests(self.settings.groups)
            right = judged.right[self._unit][self._place]
            if not self._channel.agreed(self._right is None and own != right):
                return loss
        raise Unconfirmed(f"{MAX_REDONE} runs with the right gradients in place still differ")

    def _supply(self, judged: Judgement, target: int) -> None:
        """A unit that kept the right pass for a target hands it over, place by place."""
        keeps = self._kept.get(target)
        right = judged.right[target][self._place]
        holds = keeps is not None and keeps.digests(self.settings.groups) == right
        held = [flag for flag, _ in self._channel.digests([], flag=holds)]
        giver = next(unit for unit in self.units if all(held[rank] for rank in unit))
        value = (dict(keeps.local.values), keeps.loss, keeps.buffers) if keeps and holds else None
        for source, rank in zip(giver, self.units[target], strict=True):
            given = self._channel.hand(value, giver=source, taker=rank)
            self._right = given if rank == self._channel.rank else self._right
