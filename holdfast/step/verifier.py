"""Judgement of a step's passes: doubt, repetition, audits and shadows, until one is confirmed."""

import logging
import math
import random
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from holdfast import events
from holdfast.abft import ledger
from holdfast.abft.conv.interception import every_call
from holdfast.abft.gemm.modules import numbers_of
from holdfast.collectives.checks import Collectives
from holdfast.errors import UncorrectableFault
from holdfast.events import EventKind
from holdfast.protection import Collected, collecting
from holdfast.replay.agreement import Agreement
from holdfast.replay.divergence import Replicas
from holdfast.replay.norms import total_norm
from holdfast.replay.parameters import parameters_of
from holdfast.replay.rerun import CHECK, Attempt, MicroStep, Unconfirmed, Verdict, rerun
from holdfast.replay.shadow import Shadow, ShadowReplica
from holdfast.replay.spikes import NonFiniteStreak, SpikeDetector
from holdfast.snapshot.client.at_rest import AtRest
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.step.optimizer_check import OptimizerCheck
from holdfast.step.scaling import LossScale
from holdfast.step.spare import SpareReplica
from holdfast.step.spot_check import SpotCheck
from holdfast.step.watch import PassWatch

_logger = logging.getLogger("holdfast.guard")
STATE_LOST, REPLICAS_DIFFER = 2, 3  # votes that outrank doubt about the present pass


@dataclass(frozen=True)
class FirstPass:
    """A step's first pass that its owner ran already, with its gradients in place."""

    micro_step: MicroStep
    loss: torch.Tensor
    found: Collected


class Verifier:
    """Runs the passes of a step until a result is confirmed.

    Args:
        model: The model whose gradients are judged.
        audit: Share of steps that are computed twice.
        shadow: Settings of the audits by other ranks.
        seed: Chooses the audited steps; the same on all ranks.
        agree: Combines one integer of each rank into their maximum.
        snapshots: Snapshots of the run, which compare the replicas' parameters.
        at_rest: Compares the state that a pass used with its digests after the step before.
        optimizer_check: Computes a share of the optimizer's updates again, in audited steps all.
        collectives: Compares what ranks sent and summed in a pass with what they got.
        spot: Computes a share of the model's modules again.
        watch: Refuses passes that do what they must not.
        loss_scale: Scale of the losses, by which gradients are divided before they are judged.
        timing: Makes a context whose time counts as ``"passes"`` or ``"repeats"``.

    Attributes:
        at_rest: As given.
        grad_norm: Norm of the gradients of the latest pass, without their scale.
        total_norm: The same as a tensor, as it is in the gradients.
        runs: Number of passes that were run here for the present step.
        rehearses: True if the next step is to be repeated, to see whether the program's steps can
            be repeated at all.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        audit: float,
        shadow: Shadow,
        seed: int,
        agree: Agreement,
        snapshots: Snapshots | None,
        at_rest: AtRest,
        optimizer_check: OptimizerCheck,
        collectives: Collectives,
        spot: SpotCheck,
        watch: PassWatch,
        loss_scale: LossScale,
        timing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.audit, self.seed = audit, seed
        about = model, shadow, seed, _attempted
        spare = SpareReplica(*about, snapshots, loss_scale.scaler) if shadow.spare else None
        self.shadow = spare or ShadowReplica(*about)
        self.grad_norm, self.runs, self.rehearses = math.nan, 0, False
        self.total_norm = torch.tensor(math.nan)
        self._measured = self.total_norm, math.nan  # the loss of the latest pass, and its value
        ledger.claim(self, partial(numbers_of, model))
        self._parameters = parameters_of(model)
        self._agree, self._watch, self._scale, self._timing = agree, watch, loss_scale, timing
        self._snapshots, self.at_rest, self._updates = snapshots, at_rest, optimizer_check
        self._collectives, self._spot = collectives, spot
        self._replicas = Replicas(model, agree)
        self._cut_off = False  # the last vote could not be held
        self._loss_past, self._norm_past = SpikeDetector(), SpikeDetector()
        self._nonfinite, self._overflowed = NonFiniteStreak(), False
        self._accepted: set[tuple[str, str]] = set()  # confirmed by repetition

    def verified(
        self,
        step: int,
        micro_step: MicroStep,
        *,
        first: FirstPass | None = None,
        refuses: Callable[[str], bool],
    ) -> torch.Tensor:
        """Run a step until its result is confirmed; return its loss, with its gradients in place.

        Args:
            step: Number of the step.
            micro_step: The pass, which can be repeated.
            first: The first run of it, if it was made already.
            refuses: Says of the digest of a result that is not plausible although it repeats
                whether to refuse it, because damaged parameters may be its cause.

        Raises:
            Unconfirmed: No result was confirmed.
        """
        events.set_step(step)
        started_s = time.perf_counter()
        self.shadow.begin(step)
        self.runs, self._updates.whole = 0, self.is_audited(step)
        with every_call(self._updates.whole), micro_step.undone_if_it_raises():
            return self._judged(step, micro_step, first, refuses, started_s)

    def _judged(
        self,
        step: int,
        micro_step: MicroStep,
        first: FirstPass | None,
        refuses: Callable[[str], bool],
        started_s: float,
    ) -> torch.Tensor:
        self._overflowed = False
        if first is None:
            loss, found = self._run(step, micro_step)
        else:
            loss, found = first.loss, first.found
            self._measure(step, loss, found)
        reason = self._suspicion(loss, found)
        audited = self.is_audited(step)
        differ = self._snapshots and self._replicas.differ(self._snapshots.diverged_steps)
        suspect = self._agree(REPLICAS_DIFFER if differ else self._vote(bool(reason)))
        if suspect == STATE_LOST:
            raise Unconfirmed(self._loss_of_state())
        if suspect == REPLICAS_DIFFER and self._snapshots is not None:
            raise Unconfirmed(self._replicas.reason(step, self._snapshots.committed_step))
        rehearsed, self.rehearses = self.rehearses, False
        if not suspect:
            self._nonfinite.ended()
        if not suspect and not audited and not rehearsed:
            return self._shadowed(step, micro_step, loss)
        if suspect:
            # Repetition would confirm the result of a device that repeats its error.
            self.shadow.force_audit()

        latest = found

        def repeat() -> Attempt:
            nonlocal latest
            again, still = self._run(step, micro_step)
            latest = still
            return micro_step.attempt(again, faulty=bool(still.unrepaired))

        attempt = micro_step.attempt(loss, faulty=bool(found.unrepaired))
        verdict = rerun(attempt, repeat, agree=lambda wish: bool(self._agree(wish)))
        state_lost = self._agree(self._vote(False)) == STATE_LOST
        clean = rehearsed and not (suspect or audited or state_lost)
        if clean and self._is_unrepeatable(verdict) and self._is_plain(verdict.loss, latest):
            warn_not_repeatable(step, verdict)
            return self._shadowed(step, micro_step, verdict.loss)
        if verdict.disagreed or reason:
            audit = "another rank" if suspect else "audit" if audited else "first step"
            self._report(verdict, reason or audit, started_s)
        if state_lost:
            raise Unconfirmed(self._loss_of_state())
        if verdict.kind == "persistent" and not self.shadow.force_audit():
            raise Unconfirmed(verdict.doubt)
        loss = self._shadowed(step, micro_step, verdict.loss, faulty=verdict.attempts[-1].faulty)
        if verdict.kind == "genuine" and loss is verdict.loss:
            # A check that could not be made says nothing about the next one.
            self._accepted |= {s for s in found.suspect_inputs if s[0] != EventKind.CHECK_FAILED}
        self._check_plausible(step, loss, verdict.attempts[-1].digest, refuses)
        return loss

    def collected(
        self, run: Callable[[], torch.Tensor], *, again: bool = False
    ) -> tuple[torch.Tensor, Collected]:
        """Run a pass, or a part of one, perhaps again, with the faults that were found in it."""
        with (
            collecting() as found,
            self._watch.watching(),
            self._collectives.watching(),
            self._spot.watching(),
            self._timing("repeats" if again else "passes"),
        ):
            loss = run()
        return loss, found

    def check_replicas(self, step: int) -> None:
        """Check that the replicas have come to the same parameters at the end of the run.

        Raises:
            UncorrectableFault: They have not.
        """
        snapshots = self._snapshots
        if snapshots is None or not snapshots.compares_replicas or self._cut_off:
            return
        if not self._agree(self._replicas.differ(snapshots.diverged_steps)):
            return
        committed = snapshots.committed_step
        raise UncorrectableFault(
            f"step {step}, the last one: {self._replicas.reason(step, committed)}; restart: the "
            "run continues from the last step in which they were the same"
        )

    def wrong_update(self, step: int) -> str:
        """Say which update of the last step is wrong for good, on any rank; all ranks ask."""
        lost = self._updates.lost
        what = lost.op if lost is not None else "an update of another rank"
        wrong = int(lost is not None)
        try:
            wrong = self._agree(wrong) if self._updates.share else 0
        except (RuntimeError, ValueError) as error:  # others have ended, or take too long
            self._cut_off = True
            _logger.warning("updates of other ranks in step %d are not known: %s", step, error)
        return f"step {step}, the last one: {what} gave other bits each time" if wrong else ""

    def accept(self, loss: torch.Tensor) -> None:
        """Add a step that was applied to the past, with which later ones are compared."""
        self._loss_past.accept(self.value_of(loss))
        self._norm_past.accept(self.grad_norm)
        self._scale.accept(overflowed=self._overflowed)

    def is_audited(self, step: int) -> bool:
        """Return whether a step is computed twice."""
        return self.audit > 0 and random.Random(f"{self.seed}/{step}").random() < self.audit

    def _is_unrepeatable(self, verdict: Verdict) -> bool:
        """Return whether no two runs agreed although no fault was found in any of them."""
        faulty = any(attempt.faulty for attempt in verdict.attempts)
        return verdict.kind == "persistent" and not self._agree(faulty)

    def _is_plain(self, loss: torch.Tensor, found: Collected) -> bool:
        """Return whether no rank has a reason to doubt the latest run."""
        return not self._agree(bool(self._suspicion(loss, found)))

    def _shadowed(
        self, step: int, micro_step: MicroStep, loss: torch.Tensor, *, faulty: bool = False
    ) -> torch.Tensor:
        """Return the loss that shadow replicas confirm, if the step is audited by them."""
        runs = self.runs
        loss = self.shadow.confirmed(
            micro_step, loss, lambda: self._run(step, micro_step)[0], faulty=faulty
        )
        # All ranks have run the step again, or none.
        if self.runs > runs and self._agree(self._vote(False)) == STATE_LOST:
            raise Unconfirmed(self._loss_of_state())
        return loss

    def _vote(self, doubt: bool) -> int:
        return STATE_LOST if self.at_rest.lost or self._updates.lost else doubt

    def _loss_of_state(self) -> str:
        if self._updates.lost is not None:
            return f"{self._updates.lost.op} of this rank gave other bits each time"
        lost = self.at_rest.lost
        what = f"{lost.op} of this rank" if lost is not None else "the state of another rank"
        return f"{what} changed at rest and cannot be repaired in place"

    def _report(self, verdict: Verdict, reason: str, started_s: float) -> None:
        events.record(
            EventKind.RERUN,
            detector=reason,
            rung="recompute" if verdict.disagreed and verdict.kind != "persistent" else "",
            duration_s=time.perf_counter() - started_s,
            detail={
                "verdict": verdict.kind,
                "attempts": len(verdict.attempts),
                "loss_differed": verdict.loss_differed,
            },
        )

    def _run(self, step: int, micro_step: MicroStep) -> tuple[torch.Tensor, Collected]:
        self.runs += 1
        run, again = partial(self.shadow.observe, micro_step.run), micro_step.was_run
        loss, found = self.collected(run, again=again)
        self._measure(step, loss, found)
        return loss, found

    def _measure(self, step: int, loss: torch.Tensor, found: Collected) -> None:
        """Look at what a pass used and what it left: the state at rest, gradients and verdicts.

        Loss, norm and the verdicts of a device come to the host in one transfer.
        """
        found.unrepaired += self.at_rest.check(step)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        with self._collectives.watching():
            self.total_norm = total_norm(gradients)
        found.unrepaired += self._collectives.check() + self._spot.check()
        with collecting() as late:
            values = [loss, self.total_norm, self._scale.value()]
            *losses, norm, scale = ledger.settle(partial(ledger.concerns, self), values)
        found.unrepaired += late.unrepaired
        found.suspect_inputs |= late.suspect_inputs
        self._measured = loss, float(sum(losses))
        self.grad_norm = norm / scale

    def value_of(self, loss: torch.Tensor) -> float:
        """Return the loss of a step, which is a vector if it has several micro-steps."""
        measured, value = self._measured
        return value if loss is measured else float(sum(loss.reshape(-1).tolist()))

    def _suspicion(self, loss: torch.Tensor, found: Collected) -> str:
        """Return why the result of a pass is suspect; an empty string if it is not."""
        value = self.value_of(loss)
        if found.unrepaired:
            return "unrepaired fault"
        if not (math.isfinite(value) and math.isfinite(self.grad_norm)):
            return "non-finite value"
        if found.suspect_inputs - self._accepted:
            return min(kind for kind, _ in found.suspect_inputs - self._accepted).replace("_", " ")
        if self._loss_past.is_spike(value):
            return "loss spike"
        return "gradient norm spike" if self._norm_past.is_spike(self.grad_norm) else ""

    def _check_plausible(
        self, step: int, loss: torch.Tensor, digest: str, refuses: Callable[[str], bool]
    ) -> None:
        """Refuse a confirmed result that is not finite, unless a scaler skips the step, or absurd.

        Raises:
            Unconfirmed: It is to be refused.
            UncorrectableFault: Too many steps in a row were not finite.
        """
        # Ranks whose gradients are not reduced, such as pipeline stages, may overflow alone.
        self._overflowed = bool(self._agree(not math.isfinite(self.grad_norm)))
        if self._scale.skips_overflows and self._overflowed:
            return
        value = self.value_of(loss)
        finite = not self._agree(self._overflowed or not math.isfinite(value))
        if finite:
            self._nonfinite.ended()
            if not self._agree(self._loss_past.is_absurd(value)):
                return
        if self._agree(refuses(digest)):
            what = "the loss is absurd" if finite else "loss or gradient is not finite"
            raise Unconfirmed(f"{what}, and repeats", digest)
        if not finite:
            events.record(EventKind.NONFINITE_GENUINE, detector="non-finite value")
            self._nonfinite.count(step)


def warn_not_repeatable(step: int, verdict: Verdict) -> None:
    """Say that the first step of a run has other bits each time it is run."""
    runs = len(verdict.attempts)
    detail = {"runs": runs, "remedy": CHECK}
    events.record(EventKind.STEP_NOT_REPEATABLE, detector="rerun", detail=detail)
    warnings.warn(
        f"step {step}, the first of the run, gave other bits in each of {runs} runs: a Guard "
        "cannot tell a fault from such differences, and a step in doubt will end the run; "
        f"{CHECK} finds what makes two runs differ",
        RuntimeWarning,
        stacklevel=2,
    )


def _attempted(micro_step: MicroStep) -> tuple[torch.Tensor, bool]:
    with collecting() as found:
        loss = micro_step.run()
    return loss, bool(found.unrepaired)
