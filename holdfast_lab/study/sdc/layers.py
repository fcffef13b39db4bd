"""Measures which detectors find an unhealthy device's wrong values in single training passes.

Checksums are computed as in the paper's experiment, on the linear layers of the forward and
backward pass, with the bounds of every registered threshold. The other detectors are the Guard's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

import torch
from torch import nn

from holdfast.abft.checksums.extreme import near_inf
from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.digest.tensors import tensors_digest
from holdfast.replay import SpikeDetector
from holdfast_lab.emulation.device import Strike, UnhealthyDevice
from holdfast_lab.study.sdc.subjects import Trainee
from holdfast_lab.study.vabft.residuals import exceeds, residuals

EXTREME, SPIKES, RERUN, SHADOW = "extreme values", "spike statistics", "rerun", "shadow"
Place = tuple[str, str]
Wanted = Callable[[str, str], bool]
LAYERS = (*REGISTRY, EXTREME, SPIKES, RERUN, SHADOW)


@dataclass
class Flags:
    """Numbers of rows and products that a threshold flagged."""

    rows: int = 0
    products: int = 0


@dataclass
class Checked:
    """The linear layers' products of some passes under every threshold.

    Attributes:
        rows, products: Number of rows and of products that were checked.
        flags: Number of rows and products that each threshold flagged.
        seen: Names of the thresholds that flagged the latest product of a module and direction.
    """

    rows: int = 0
    products: int = 0
    flags: dict[str, Flags] = field(default_factory=lambda: {name: Flags() for name in REGISTRY})
    seen: dict[Place, frozenset[str]] = field(default_factory=dict)

    def add(self, key: Place, product: Product) -> None:
        """Check one product."""
        assert product.c is not None
        found = residuals(product.a, product.b, product.c)
        over = {
            name: exceeds(member(product), found[member.weights])
            for name, member in REGISTRY.items()
        }
        self.products += 1
        self.rows += product.rows.numel()
        for name, rows in over.items():
            self.flags[name].rows += int(rows.sum())
            self.flags[name].products += bool(rows.any())
        self.seen[key] = frozenset(name for name, rows in over.items() if bool(rows.any()))


@contextmanager
def checked(
    model: nn.Module, found: Checked, device: UnhealthyDevice | None = None
) -> Iterator[None]:
    """Check each linear layer's output, and the gradient of its input, as they are computed.

    With a device only the products that it corrupts are checked. The device's context has to be
    entered first: errors inside a product are then checked, and errors behind it are not.
    """

    def wanted(name: str, role: str) -> bool:
        return device is None or (
            bool(device.strikes) and _place(device.strikes[-1]) == (name, role)
        )

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                forward = partial(_forward, found, name, wanted)
                backward = partial(_backward, found, name, wanted)
                stack.callback(module.register_forward_hook(forward, prepend=True).remove)
                stack.callback(module.register_full_backward_hook(backward).remove)
        yield


def _place(strike: Strike) -> Place:
    """Return the module and the role of the matmul that got the fault."""
    return strike.op.split("/")[0], strike.op.split("/")[-1]


def _forward(
    found: Checked,
    name: str,
    wanted: Wanted,
    module: nn.Linear,
    args: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    if not wanted(name, "forward"):
        return
    a = args[0].detach().reshape(-1, module.in_features)
    c = output.detach().reshape(-1, module.out_features)
    if module.bias is not None:
        c = c.double() - module.bias.detach().double()
    product = Product(a, module.weight.detach().T, c, output.dtype)
    found.add((name, "forward"), product)


def _backward(
    found: Checked,
    name: str,
    wanted: Wanted,
    module: nn.Linear,
    ours: tuple[torch.Tensor | None, ...],
    theirs: tuple[torch.Tensor, ...],
) -> None:
    if ours[0] is not None and wanted(name, "grad_a"):
        a = theirs[0].detach().reshape(-1, module.out_features)
        c = ours[0].detach().reshape(-1, module.in_features)
        found.add((name, "grad_a"), Product(a, module.weight.detach(), c, ours[0].dtype))


@dataclass
class Caught:
    """A node's numbers of wrong calls ("faults") and steps, and those that each detector found."""

    faults: int = 0
    inside: int = 0
    steps: int = 0
    changed_steps: int = 0
    faults_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    steps_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))

    def add(self, strikes: list[Strike], by_step: set[str], by_fault: list[set[str]]) -> None:
        """Count which detectors found a faulty step as a whole, and which each fault in it."""
        self.faults += len(strikes)
        self.inside += sum(strike.inside for strike in strikes)
        self.steps += 1
        for layer in LAYERS:
            per_fault = [layer in by_step or layer in seen for seen in by_fault]
            self.faults_by[layer] += sum(per_fault)
            self.steps_by[layer] += any(per_fault)


class Bench:
    """A healthy training whose steps are also computed by many emulated devices.

    A device computes a step, and if it erred it computes the step again (a rerun). Both results are
    compared with the healthy pass (a shadow), with which the training continues.
    """

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._losses, self._norms = SpikeDetector(), SpikeDetector()

    def step(self, step: int, devices: Sequence[tuple[UnhealthyDevice, Caught]] = ()) -> None:
        """Run one step; it counts for the devices that had faults in it."""
        healthy = self._digest(self._trainee.gradients(step))
        for device, caught in devices:
            self._struck(step, device, caught, healthy)
        self._losses.accept(self._trainee.gradients(step))
        self._norms.accept(self._trainee.update())

    def _struck(
        self, step: int, device: UnhealthyDevice, caught: Caught, healthy: tuple[float, str]
    ) -> None:
        trainee, found = self._trainee, Checked()
        device.strikes.clear()
        with device, checked(trainee.model, found, device):
            loss = trainee.gradients(step)
        strikes = list(device.strikes)
        if not strikes:
            return
        first, spiked = self._digest(loss), self._spikes(loss)
        with device:
            again = self._digest(trainee.gradients(step))
        by_step = {SPIKES} if spiked else set()
        by_step |= {RERUN} if first != again else set()
        by_step |= {SHADOW} if first != healthy else set()
        caught.add(strikes, by_step, [_seen(strike, found) for strike in strikes])
        caught.changed_steps += first != healthy

    def _digest(self, loss: float) -> tuple[float, str]:
        return loss, tensors_digest(self._trainee.grads())

    def _spikes(self, loss: float) -> bool:
        norm = float(torch.stack([grad.norm() for grad in self._trainee.grads()]).norm())
        if not (isfinite(loss) and isfinite(norm)):
            return True
        return self._losses.is_spike(loss) or self._norms.is_spike(norm)


def _seen(strike: Strike, found: Checked) -> set[str]:
    """List what finds this fault alone: checksums of its product, and extreme values."""
    seen: set[str] = set()
    if strike.inside:
        seen |= found.seen[_place(strike)]
    limit = near_inf(torch.float32)
    if any(not isfinite(value) or abs(value) > limit for value in strike.after):
        seen.add(EXTREME)
    return seen
