"""Shadow replicas: another rank computes a rank's micro-step too, and digests are compared.

A device that errs in the same way every time agrees with itself, so that no repetition on the
device finds the fault. In an audited step each unit (``units``) also computes another unit's
micro-batch, from that unit's random state and buffers and with the same parameters. Digests of
loss, local gradients and buffers are compared before the reduced gradient is applied. If they
differ, a third unit computes the micro-batch too, and the majority decides which unit was wrong.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError
from holdfast.replay.accused import Accused
from holdfast.replay.buffers import Buffers, put_values
from holdfast.replay.buffers import Values as BufferValues
from holdfast.replay.gradients import (
    LocalGradients,
    Start,
    Values,
    local_gradients,
    set_aside,
    unreduced,
)
from holdfast.replay.majority import (
    Digests,
    Judgement,
    Run,
    is_sampled,
    judge,
    part_for,
    part_of,
    schedule,
)
from holdfast.replay.parameters import parameters_of
from holdfast.replay.passes import GroupStep, Pass, device_of, portable_rng, received_rng
from holdfast.replay.rerun import ForwardBackward, MicroStep, Unconfirmed
from holdfast.replay.units import Channel, units_of

MAX_REDONE = 3  # runs with the right gradients put in place, until all ranks have them

Attempt = Callable[[MicroStep], tuple[torch.Tensor, bool]]


@dataclass(frozen=True)
class Shadow:
    """Settings of audits by shadow replicas; ``Guard(shadow=0.01)`` means ``Shadow(0.01)``.

    Args:
        rate: Share of steps, 0 to 1, in which every unit's step is computed by another unit too.
        mesh: The ``DeviceMesh`` of the whole job, if several ranks compute one gradient together.
        unit: Names of the mesh's dimensions along which they do; by default all dimensions that are
            not data-parallel.
        groups: Number of micro-batches of a step, if one of them is to be audited instead of all.
        group_step: ``group_step(batch, group)`` computes one micro-batch as ``forward_backward``
            computes all of them: it calls the model once, calls ``backward()`` and returns the
            loss. It draws no random number before it calls the model.
        until_evicted: True to audit every step once a unit is known to err persistently, so that
            its results are not applied until it is replaced.
        spare: True to have ``holdfast spare`` compute the sampled steps, each that of one rank, in
            the place of ranks; they are compared once they are applied.

    Raises:
        ConfigError: The rate or the number of groups is out of range, or only one of ``groups`` and
            ``group_step`` is given, or one of these or a unit with ``spare``.
    """

    rate: float
    mesh: DeviceMesh | None = None
    unit: tuple[str, ...] | None = None
    groups: int = 1
    group_step: GroupStep | None = None
    until_evicted: bool = True
    spare: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"shadow = {self.rate!r} must be a share of steps between 0 and 1")
        if self.groups < 1 or (self.groups > 1) != (self.group_step is not None):
            raise ConfigError(
                f"groups = {self.groups} and group_step = {self.group_step!r}: to audit one of "
                "several micro-batches give their number, and what computes one; else neither"
            )
        if self.spare and (self.mesh, self.unit, self.groups) != (None, None, 1):
            raise ConfigError("spare=True: one rank's whole step; leave out mesh, unit and groups")


class ShadowReplica:
    """One rank's part in the audits of a ``Guard``. All ranks construct it together.

    Args:
        model: The model as it is called: DDP, FSDP2, tensor-parallel or plain.
        settings: Settings of the audits; with rate 0 nothing is done at all.
        seed: Chooses steps, shadows and groups; the same on all ranks.
        attempt: Runs a micro-step; returns its loss, and whether a fault was found and not
            repaired.

    Attributes:
        rate: The share of steps that is audited, here or by spares.
        units: The ranks of each unit.
        accused: The units that were wrong so far.

    Guarantees: in an audited step, a wrong local gradient, loss or buffer of one unit, of any size
    and repeated or not, is replaced by what two other units computed, bit for bit, before it is
    reduced and applied, and the unit's ranks are named. Healthy programs are never accused. With
    two units a fault is corrected if repetition shows which side is right; otherwise the step is
    not confirmed.

    Not covered: parameters and optimizer state, which are not compared; the reduction itself;
    faults that affect two units in the same way; programs that are not deterministic across ranks
    (other devices, other numbers of threads) or whose ``forward_backward`` communicates beyond its
    wrapper.

    Source: Ma et al. (2025), section 7, proposes one shadow replica. Here every rank is the shadow
    of another one at the same time, because all ranks would wait for a single shadow. The majority
    and the correction are not in the paper.

    Raises:
        ConfigError: There is only one unit, or the model normalises over ranks. At the first step:
            units hold different parameters.
    """

    def __init__(self, model: nn.Module, settings: Shadow, seed: int, attempt: Attempt) -> None:
        self.settings, self.seed, self.rate = settings, seed, settings.rate
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
        self._compared = False

    _right: tuple[Values, torch.Tensor, BufferValues] | None
    _own: Pass | None

    def begin(self, step: int) -> None:
        """Begin a step and draw at random if it is audited.

        Raises:
            ConfigError: At the first step, ranks that stand for each other hold other parameters.
        """
        if self.settings.rate and not self._compared:
            self._compare_parameters()
            self._compared = True
        self._step, self._own, self._right = step, None, None
        sampled = is_sampled(self.settings.rate, self.seed, step)
        self._due = sampled or (self.settings.until_evicted and bool(self.accused.evicted))

    def _compare_parameters(self) -> None:
        """Check that a rank can compute the step of the ranks with its place in other units."""
        parameters = parameters_of(self._model)
        plain = [p.detach() for p in parameters if not hasattr(p, "device_mesh")]
        digests = [own for _, (own,) in self._channel.digests([tensors_digest(plain)], flag=False)]
        for ranks in zip(*self.units, strict=True):
            other = [rank for rank in ranks if digests[rank] != digests[ranks[0]]]
            if other:
                raise ConfigError(
                    f"ranks {ranks[0]} and {other[0]} hold different parameters, so that neither "
                    "can compute the other's step: if they are stages of a pipeline, give "
                    'Shadow(mesh=...) the mesh of the whole job with its dimension "pp"; replicas '
                    "need the same parameters from the first step on"
                )

    def force_audit(self) -> bool:
        """Audit the present step whatever was drawn; return False if audits are switched off.

        All ranks call it together, when the step's result is in doubt.
        """
        self._due = bool(self.settings.rate)
        return self._due

    def observe(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run this rank's own pass and, in an audited step, observe its local gradients."""
        if not self._due:
            return run()
        right = self._right[0] if self._right else None
        with local_gradients(self._model, right=right) as local:
            loss = run()
        self._own = self._seen(loss, local, faulty=False)
        if self._right:
            loss = self._right[1]
            put_values(self._model, self._right[2])
        return loss

    def confirmed(
        self,
        step: MicroStep,
        loss: torch.Tensor,
        redo: Callable[[], torch.Tensor],
        *,
        faulty: bool = False,
    ) -> torch.Tensor:
        """Audit the step if it is due; return the right loss, with the right gradients in place.

        Args:
            step: Micro-step of this rank, whose gradients are in place.
            loss: Loss of the micro-step.
            redo: Runs the step again through ``observe``; called on all ranks if one was wrong.
            faulty: True if a fault was found in the step and not repaired, so that it has no vote.

        Raises:
            Unconfirmed: There is no majority for some unit's outcome.
        """
        if not self._due:
            return loss
        started_s = time.perf_counter()
        if self._own is None:  # the audit was forced after the step had run
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
        """Compute passes for other units until every outcome has a majority or rounds run out."""
        shifts = schedule(len(self.units), self.seed, self._step)
        runs = list(own)
        escalated = self.settings.groups > 1
        if escalated:
            part = part_for(self.settings.groups, self.seed, self._step)
            found = self._round(step, shifts[0], part=part, keep=False)
            parts = {run.target: part_of(run.outcome, part) for run in own}
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
        """Compute one pass for the unit that is ``shift`` further on; called by all units."""
        units = len(self.units)
        target = (self._unit + shift) % units
        asking = self.units[(self._unit - shift) % units][self._place]
        start = self._start(step, part)
        mine = (step.batch, portable_rng(start.rng, self._channel.device), start.values())
        other = self.units[target][self._place]
        batch, rng, buffers = self._channel.rotate(mine, to=asking, source=other)
        begin = Start(received_rng(rng, self._channel.device), buffers)
        found = self._alone(step.replaced(batch, begin, self._group_step(part)), keep=keep)
        if keep:
            self._kept[target] = found
        one = found.local.of_group(0)
        digests = (one,) if part is not None else found.digests(self.settings.groups)
        gathered = self._gathered(digests, faulty=found.faulty)
        return [
            Run((unit + shift) % units, unit, outcome, part, faulty)
            for unit, (faulty, outcome) in enumerate(gathered)
        ]

    def _group_step(self, part: int | None) -> ForwardBackward | None:
        """Return the ``forward_backward`` of one accumulation group; None for the whole step."""
        group_step = self.settings.group_step
        if part is None or group_step is None:
            return None
        return lambda batch: group_step(batch, part)

    def _start(self, step: MicroStep, part: int | None) -> Start:
        """Return the start of a pass, with the buffers that DDP broadcasts before it."""
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
        return Pass(loss.detach(), local, Buffers(self._model).values(), faulty)

    def _gathered(self, mine: Digests, *, faulty: bool) -> list[tuple[bool, tuple[Digests, ...]]]:
        """Gather by unit the digests of its ranks, and True if a fault was found on any of them."""
        every = self._channel.digests(mine, flag=faulty)
        return [
            (any(every[rank][0] for rank in unit), tuple(every[rank][1] for rank in unit))
            for unit in self.units
        ]

    def _corrected(
        self, judged: Judgement, wrong: list[int], redo: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Repeat the step with the right local gradients in the place of the wrong ones."""
        for target in wrong:
            self._supply(judged, target)
        for _ in range(MAX_REDONE):
            loss = redo()
            assert self._own is not None
            own = self._own.digests(self.settings.groups)
            right = judged.right[self._unit][self._place]
            if not self._channel.any_rank(self._right is None and own != right):
                return loss
        raise Unconfirmed(f"{MAX_REDONE} runs with the right gradients in place still differ")

    def _supply(self, judged: Judgement, target: int) -> None:
        """Send the right pass from a unit that kept it to the target, rank by rank."""
        keeps = self._kept.get(target)
        right = judged.right[target][self._place]
        holds = keeps is not None and keeps.digests(self.settings.groups) == right
        held = [flag for flag, _ in self._channel.digests([], flag=holds)]
        giver = next(unit for unit in self.units if all(held[rank] for rank in unit))
        value = (dict(keeps.local.values), keeps.loss, keeps.buffers) if keeps and holds else None
        for source, rank in zip(giver, self.units[target], strict=True):
            given = self._channel.hand(value, giver=source, taker=rank)
            self._right = given if rank == self._channel.rank else self._right
