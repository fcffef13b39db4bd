"""A Guard for training loops that cannot call it: the hooks of their optimizer do."""

import math
from functools import partial

import torch
from torch import nn

from holdfast import events
from holdfast.abft import ledger
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.events import EventKind
from holdfast.guard import Guard, hopeless
from holdfast.optimizers import innermost_of
from holdfast.protection import collecting
from holdfast.replay.norms import total_norm
from holdfast.step.hooks import weak_hook


class AttachedGuard(Guard):
    """Counts an optimizer's steps, takes snapshots, and refuses non-finite gradients.

    Made by ``Guard.attach``, which says what it covers.
    """

    _applies = False
    _norm = math.nan  # of the gradients of the present step

    def _check_usable(self) -> None:
        raise ConfigError(
            "Guard.attach watches a loop that it cannot repeat: to have steps verified, make a "
            "Guard(...) and call its step or micro_step"
        )

    def _watches(self) -> str:
        events.record(EventKind.GUARD_ATTACHED)
        return "attached to its optimizer: refuses non-finite gradients, repeats no step"

    def _between_batches(self) -> None:
        self.begin_snapshot()

    def _add_hooks(self) -> None:
        events.set_step(self.steps_done)
        optimizers = innermost_of(self.optimizer)
        refuses = weak_hook(self._refuse_nonfinite)
        self._hooks = [each.register_step_pre_hook(refuses) for each in optimizers]
        counts, begins = weak_hook(self._count_step), weak_hook(self._begin_in_training)
        self._hooks.append(optimizers[-1].register_step_post_hook(counts))
        self._hooks.append(self.model.register_forward_pre_hook(begins))

    def _refuse_nonfinite(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in held if gradient is not None]
        with collecting() as found:
            [norm] = ledger.settle(
                partial(ledger.concerns, self._verifier), [total_norm(gradients)]
            )
        # A GradScaler lets a fused optimizer skip such gradients by itself.
        left_to_scaler = hasattr(optimizer, "found_inf")
        if self._agree(bool(found.unrepaired)):
            cause = "a product was wrong, and an attached Guard cannot repeat the step"
            raise UncorrectableFault(hopeless(self.steps_done, cause))
        if self._agree(not math.isfinite(norm) and not left_to_scaler):
            cause = "a gradient is not finite, and an attached Guard cannot repeat the step"
            raise UncorrectableFault(hopeless(self.steps_done, cause))
        if self.snapshots is not None:
            self.snapshots.finish()
        self._norm = norm

    def _count_step(self, *_: object) -> None:
        self.steps_done += 1
        self._log_step(math.nan, self._norm)  # the loss is the loop's own
        events.set_step(self.steps_done)

    def _begin_in_training(self, model: nn.Module, *_: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.begin_snapshot()
