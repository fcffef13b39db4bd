"""Compare two ranks that run the same program on the same data, value by value.

These context managers measure how a suspect device differs from a healthy one, as in the study of
silent data corruption in LLM training (Ma et al., 2025, section 3), for any model:

- ``lockstep`` (computation synchronisation, RQ1) compares the outputs of every submodule after its
  forward pass and the gradients of its inputs in the backward pass. The suspect continues with the
  reference's values, so that every mismatch was made by the submodule in which it is counted.
- ``parameter_sync`` (RQ2) compares gradients before each optimizer step. Afterwards the suspect
  takes the reference's parameters and buffers, so that errors do not accumulate.
- ``drift`` (RQ3) synchronises nothing and measures how far the parameters have come apart.

Values are compared bit for bit. Each rank waits for the other one at every comparison, which makes
training slow: this measures devices and does not protect a production run.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_map

from holdfast.errors import ConfigError
from holdfast.replay.partners import Partner

FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Mismatches:
    """The mismatches of one submodule in one direction.

    Attributes:
        module: Name of the submodule.
        direction: ``"forward"`` for outputs, ``"backward"`` for gradients of inputs.
        calls: Number of comparisons.
        elements: Number of values that were compared.
        mismatches: Number of values whose bits differed.
        wrong_calls: Number of comparisons in which any value differed.
        severity: Mean of |suspect - reference| / |reference| over the values that differ and whose
            reference is not 0, in the worst comparison; NaN and INF count as INF.
    """

    module: str
    direction: str
    calls: int = 0
    elements: int = 0
    mismatches: int = 0
    wrong_calls: int = 0
    severity: float = 0.0

    @property
    def frequency(self) -> float:
        """Share of the values that differed."""
        return self.mismatches / self.elements if self.elements else 0.0

    def add(self, reference: torch.Tensor, suspect: torch.Tensor) -> None:
        """Count one comparison."""
        differ = _differ(reference, suspect)
        count = int(differ.sum())
        self.calls += 1
        self.elements += reference.numel()
        self.mismatches += count
        self.wrong_calls += count > 0
        if count:
            self.severity = max(self.severity, _severity(reference[differ], suspect[differ]))


class Lockstep:
    """The comparisons of a ``lockstep`` context; both ranks see both values and count the same."""

    def __init__(self, partner: Partner) -> None:
        self._partner = partner
        self._found: dict[tuple[str, str], Mismatches] = {}

    @property
    def mismatches(self) -> list[Mismatches]:
        """One entry for each submodule and direction, in the order of their first comparison."""
        return list(self._found.values())

    def compare(self, module: str, direction: str, values: torch.Tensor) -> torch.Tensor:
        """Exchange values with the partner, count the mismatches, return the reference's values."""
        reference, suspect = self._partner.pair(values)
        key = module, direction
        self._found.setdefault(key, Mismatches(*key)).add(reference, suspect)
        return reference


@contextmanager
def lockstep(
    model: nn.Module,
    partner: int,
    *,
    reference: bool,
    modules: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[Lockstep]:
    """Compare every submodule's computation with the partner's while the context is open.

    Args:
        model: The same model on both ranks, not wrapped in anything that reduces gradients.
        partner: Number of the other rank, which opens the same context.
        reference: True on the rank whose values are the correct ones, which is one of the two.
        modules: Function of a name and a submodule that returns True if it is compared. By default
            every submodule without submodules of its own is compared.

    Yields:
        The comparisons so far.

    Raises:
        ConfigError: ``Partner`` refuses the ranks, or no submodule is chosen.
        RuntimeError: The partner is gone.
    """
    wanted = modules or (lambda _, module: not any(module.children()))
    chosen = [(name, module) for name, module in model.named_modules() if wanted(name, module)]
    if not chosen:
        raise ConfigError("no submodule of the model was chosen to be compared")
    with closing(Partner(partner, reference=reference)) as other, ExitStack() as stack:
        found = Lockstep(other)
        for name, module in chosen:
            _watch(stack, found, name or "(model)", module)
        yield found


def _watch(stack: ExitStack, found: Lockstep, name: str, module: nn.Module) -> None:
    """Compare the outputs and the gradients of the inputs of one submodule."""

    def gradient_of(value: object) -> object:
        if not (_is_float(value) and value.requires_grad):
            return value
        view = value.view_as(value)  # its gradient is that of this submodule alone
        if view.requires_grad:  # False under no_grad
            view.register_hook(lambda grad: found.compare(name, BACKWARD, grad))
        return view

    def output(value: object) -> object:
        if not _is_float(value):
            return value
        synchronised = value.clone()
        with torch.no_grad():
            synchronised.copy_(found.compare(name, FORWARD, value))
        return synchronised

    def entered(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[object, dict[str, object]]:
        return tree_map(gradient_of, args), tree_map(gradient_of, kwargs)

    def left(_: nn.Module, __: object, result: object) -> object:
        return tree_map(output, result)

    stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(left).remove)


def _is_float(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass
class Updates:
    """Differences between two ranks' optimizer steps.

    Attributes:
        noise: Noise-to-signal ratio of the gradients in each step, ‖g' - g‖₂ / ‖g‖₂ over all
            parameters.
        drift: Distance of the parameters after each step, ‖θ' - θ‖₂, before any synchronisation.
    """

    noise: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    @property
    def worst_noise(self) -> float:
        """Largest noise of any step (WCNTS, figure 5 of the study)."""
        return max(self.noise, default=0.0)


def parameter_sync(
    model: nn.Module, optimizer: torch.optim.Optimizer, partner: int, *, reference: bool
) -> AbstractContextManager[Updates]:
    """Compare gradients before each optimizer step and synchronise the suspect after it.

    The suspect takes the reference's parameters and buffers.

    Args:
        model: The same model on both ranks, not wrapped in anything that reduces gradients.
        optimizer: The optimizer whose steps are compared.
        partner: Number of the other rank, which opens the same context.
        reference: True on the rank whose values are the correct ones, which is one of the two.

    Returns:
        A context manager, whose value has the comparisons so far.

    Raises:
        ConfigError: ``Partner`` refuses the ranks.
        RuntimeError: The partner is gone.
    """
    return _compared(model, optimizer, partner, reference=reference, synchronise=True)


def drift(
    model: nn.Module, optimizer: torch.optim.Optimizer, partner: int, *, reference: bool
) -> AbstractContextManager[Updates]:
    """Compare as ``parameter_sync`` does, with the same arguments, and synchronise nothing."""
    return _compared(model, optimizer, partner, reference=reference, synchronise=False)


@contextmanager
def _compared(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    partner: int,
    *,
    reference: bool,
    synchronise: bool,
) -> Iterator[Updates]:
    found = Updates()
    with closing(Partner(partner, reference=reference)) as other, ExitStack() as stack:

        def before(*_: object) -> None:
            noise = signal = 0.0
            for grad in (p.grad for p in model.parameters() if p.grad is not None):
                ours, theirs = (side.double() for side in other.pair(grad))
                noise += float((theirs - ours).square().sum())
                signal += float(ours.square().sum())
            found.noise.append(_ratio(noise, signal))

        @torch.no_grad()
        def after(*_: object) -> None:
            squares = 0.0
            for parameter in model.parameters():
                ours, theirs = other.pair(parameter)
                squares += float((theirs.double() - ours.double()).square().sum())
                if synchronise:
                    parameter.copy_(ours)
            found.drift.append(math.sqrt(squares) if squares == squares else math.inf)
            for buffer in model.buffers() if synchronise else ():
                buffer.copy_(other.pair(buffer)[0])

        stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(after).remove)
        yield found


def _ratio(noise: float, signal: float) -> float:
    """Return √(noise / signal) of two sums of squares; INF where that is not a finite number."""
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal and math.isfinite(noise) else math.inf


def _differ(reference: torch.Tensor, suspect: torch.Tensor) -> torch.Tensor:
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (reference, suspect))
    rows = -1, reference.element_size()
    return (one.reshape(rows) != other.reshape(rows)).any(-1).reshape(reference.shape)


def _severity(reference: torch.Tensor, suspect: torch.Tensor) -> float:
    known = reference.double()
    differences = (suspect.double() - known).abs()
    counted = known != 0
    if not bool(counted.any()):
        return math.inf
    mean = float((differences[counted] / known[counted].abs()).mean())
    return mean if math.isfinite(mean) else math.inf
