"""Two ranks in lock-step: where, how often and how far does one of them compute otherwise?

The instruments of the study of silent data corruption in LLM training (Ma et al., 2025, section 3),
for any model. Both ranks run the same program on the same data.

- ``lockstep`` (computation synchronisation, RQ1): after each submodule's forward pass outputs are
  compared, and in the backward pass gradients of its inputs; the suspect goes on with the
  reference's, so that every mismatch is the submodule's own.
- ``parameter_sync`` (RQ2): gradients are compared before each optimizer step; after it the suspect
  takes the reference's parameters and buffers, so that errors do not add up.
- ``drift`` (RQ3): nothing is synchronised; how far the parameters have come apart.

Values are compared bit for bit. The ranks wait for each other at every comparison: these are
instruments, not protection.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from holdfast.errors import ConfigError
from holdfast.replay.partners import Partner

FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Mismatches:
    """What one submodule did in one direction.

    Attributes:
        module: its name; direction: ``forward`` (outputs) or ``backward`` (gradients of inputs).
        calls, elements: how often it was compared, and how many values in all.
        mismatches: values whose bits differed; struck_calls: calls with any.
        severity: of the worst call, the mean of |suspect - reference| / |reference| over the values
            that differed and whose reference is not 0; NaN and INF count as INF.
    """

    module: str
    direction: str
    calls: int = 0
    elements: int = 0
    mismatches: int = 0
    struck_calls: int = 0
    severity: float = 0.0

    @property
    def frequency(self) -> float:
        """The share of values that differed."""
        return self.mismatches / self.elements if self.elements else 0.0

    def add(self, reference: torch.Tensor, suspect: torch.Tensor) -> None:
        """Count one comparison."""
        differ = _differ(reference, suspect)
        count = int(differ.sum())
        self.calls += 1
        self.elements += reference.numel()
        self.mismatches += count
        self.struck_calls += count > 0
        if count:
            self.severity = max(self.severity, _severity(reference[differ], suspect[differ]))


class Lockstep:
    """The comparisons of a ``lockstep``; on both sides the same, as both see both values."""

    def __init__(self, partner: Partner) -> None:
        self._partner = partner
        self._found: dict[tuple[str, str], Mismatches] = {}

    @property
    def mismatches(self) -> list[Mismatches]:
        """Of every submodule and direction, in the order of their first comparison."""
        return list(self._found.values())

    def agreed(self, module: str, direction: str, values: torch.Tensor) -> torch.Tensor:
        """The reference's values, after both were compared."""
        theirs = self._partner.exchange(values)
        mine = values.detach()
        reference, suspect = (mine, theirs) if self._partner.reference else (theirs, mine)
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
    """Compare every submodule's computation with the partner's, while the context is open.

    Args:
        model: the same on both ranks; not wrapped in anything that reduces gradients.
        partner: the other rank, which does the same.
        reference: whether this rank's values count; exactly one of the two must say so.
        modules: which submodules, by name; None: those without submodules of their own.

    Yields:
        The comparisons so far.

    Raises:
        ConfigError: as ``Partner``, or no submodule is chosen. RuntimeError: the partner is gone.
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
    def entered(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda value: _through(_Backward, value, found, name), (args, kwargs))

    def left(_: Any, __: Any, result: Any) -> Any:
        return tree_map(lambda value: _through(_Forward, value, found, name), result)

    stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(left).remove)


def _through(kind: Any, value: Any, found: Lockstep, name: str) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if kind is _Backward and not value.requires_grad:
        return value
    return kind.apply(value, found, name)


class _Forward(torch.autograd.Function):
    """Compares and synchronises in the forward pass only."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, found: Lockstep, name: str) -> torch.Tensor:
        return found.agreed(name, FORWARD, values).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


class _Backward(torch.autograd.Function):
    """Compares and synchronises in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, found: Lockstep, name: str) -> torch.Tensor:
        ctx.found, ctx.name = found, name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.found.agreed(ctx.name, BACKWARD, grads[0]), None, None


@dataclass
class Updates:
    """What two ranks' optimizer steps had in common.

    Attributes:
        noise: of each step, the noise-to-signal ratio of the gradients it was made from,
            ‖g' - g‖₂ / ‖g‖₂ over all parameters.
        drift: after each step, ‖θ' - θ‖₂ over all parameters, before any synchronisation.
    """

    noise: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    @property
    def worst_noise(self) -> float:
        """The worst step's: max_j ‖g'_j - g_j‖₂ / ‖g_j‖₂ (WCNTS, figure 5 of the study)."""
        return max(self.noise, default=0.0)


@contextmanager
def parameter_sync(
    model: nn.Module, optimizer: torch.optim.Optimizer, partner: int, *, reference: bool
) -> Iterator[Updates]:
    """Compare gradients at each ``optimizer.step``; the suspect takes the reference's parameters
    and buffers after it.

    Args, Raises: as ``lockstep``.

    Yields:
        What was compared so far.
    """
    with _compared(model, optimizer, partner, reference=reference, synchronise=True) as found:
        yield found


@contextmanager
def drift(
    model: nn.Module, optimizer: torch.optim.Optimizer, partner: int, *, reference: bool
) -> Iterator[Updates]:
    """As ``parameter_sync``, but nothing is synchronised."""
    with _compared(model, optimizer, partner, reference=reference, synchronise=False) as found:
        yield found


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

        def before(*_: Any) -> None:
            noise = signal = 0.0
            for grad in (p.grad for p in model.parameters() if p.grad is not None):
                ours, theirs = (side.double() for side in _sides(other, grad))
                noise += float((theirs - ours).square().sum())
                signal += float(ours.square().sum())
            found.noise.append(_ratio(noise, signal))

        @torch.no_grad()
        def after(*_: Any) -> None:
            squares = 0.0
            for parameter in model.parameters():
                ours, theirs = _sides(other, parameter)
                squares += float((theirs.double() - ours.double()).square().sum())
                if synchronise:
                    parameter.copy_(ours)
            found.drift.append(math.sqrt(squares) if squares == squares else math.inf)
            for buffer in model.buffers() if synchronise else ():
                buffer.copy_(_sides(other, buffer)[0])

        stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(after).remove)
        yield found


def _sides(partner: Partner, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's values, and the suspect's."""
    theirs, mine = partner.exchange(tensor), tensor.detach()
    return (mine, theirs) if partner.reference else (theirs, mine)


def _ratio(noise: float, signal: float) -> float:
    """The root of two sums of squares' ratio; of noise that is no number, INF."""
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
