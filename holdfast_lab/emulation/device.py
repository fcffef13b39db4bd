"""An emulated unhealthy device, which corrupts values at the rates of a node in the SDC study.

    with UnhealthyDevice(model, node=7, seed=0) as device:
        for step, batch in enumerate(loader):
            events.set_step(step)
            train(batch)
    print(device.tallies, device.strikes[-1])

**Frequency.** The paper prints the share of wrong values in the outputs of submodules (forward) and
in the gradients of their inputs (backward). A call with n values has ``frequency · rate_scale · n``
wrong ones on average over whole bursts. With ``rate_scale`` 1 the share is the paper's, so that a
small model has fewer wrong values in a call. ``PAPER_CALL_VALUES / n`` keeps their number instead.

**Time.** A node errs in bursts (``emulation/profile.py``). Nodes 10, 11 and 14 err in every step,
10 and 11 more often in the first steps. Node 13 is healthy before step 450 of training.

**Size of errors**: see ``emulation/strike.py``.

**Place.** The share ``inside`` of the wrong values is put into the product that computes a
submodule's output, or its input's gradient, before a checksum verifies it (``holdfast.sites``). The
rest is put behind it by module hooks, where no checksum is computed. The paper does not give this
share (appendix D.3).
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import nn

from holdfast import events, sites
from holdfast.errors import ConfigError
from holdfast.protection import protect
from holdfast_lab.emulation.hooks import on_input_gradient, on_output
from holdfast_lab.emulation.places import Place, Submodule, everywhere, outputs, submodules
from holdfast_lab.emulation.profile import (
    BACKWARD,
    FORWARD,
    PAPER_CALL_VALUES,
    SETTINGS,
    SUBMODULES,
    TRAINING,
    NodeProfile,
    Rhythm,
    node_profile,
)
from holdfast_lab.emulation.records import Strike, Tally, make_strike
from holdfast_lab.emulation.strike import count_wrong, generator, wrong_values

__all__ = ["PAPER_CALL_VALUES", "NodeProfile", "Rhythm", "Strike", "Tally", "UnhealthyDevice"]

SPIKE_FACTOR, SPIKE_STEPS = 5.0, 5  # ours: figure 4 has no scale for "the first few steps"
KEPT_STRIKES = 10_000

_Key = tuple[int, str, str]


class UnhealthyDevice:
    """While the context is open, what the model computes is wrong as on one of the paper's nodes.

    Args:
        model: A model with decoder layers of an attention and an FFN, not wrapped. Its matmuls are
            named while the context is open, as by ``protect(model, verify=False)``.
        node: Number of the node, 1 to 15.
        seed: Determines when and where the device errs.
        setting: ``"training"`` is the paper's runs without comparisons. In ``"lockstep"`` nodes 2,
            3 and 12 are silent, node 14 has one burst and node 13 errs from the start. In a task of
            table 5, such as ``"cosmosqa"``, the nodes that agreed with the healthy one are silent.
        persistent: If True, every call of an op in a step errs in the same way, so that a repeated
            step gives the same wrong result. Otherwise no two calls err in the same way.
        rate_scale: Factor on the frequencies, which remain at most 1.
        step_scale: Factor on the paper's numbers of steps, which are node 13's onset and the length
            of the run in which node 14 has one burst.
        start_step: First step in which the device errs; by default that of the profile.
        inside: Share of the wrong values that are put into matmuls, 0 to 1.
        bound_rms: Largest error, in units of the corrupted tensor's rms. With None errors are as
            large as the printed severity makes them, which no gradient survives on some nodes.
        places: ``"outputs"`` corrupts the values that the paper compares, so that their measured
            frequency is the profile's. ``"everywhere"`` corrupts each matmul of the submodules,
            each norm, dropout and activation, and the residual streams, all at the same frequency
            per value. Wrong values then spread, and more outputs of submodules are wrong than the
            profile says.
        rhythm: Steps in which the device errs; by default those of the profile.

    Attributes:
        strikes: The latest 10,000 calls with wrong values. The event ledger has all, as
            ``injected``.
        tallies: Number of values computed and of wrong values, by (layer, direction, part).

    **Guarantees**: the same arguments and the same calls give the same errors. Healthy steps, and
    the model after the context, compute bit for bit as if the device had never been there.

    **Not covered**: matmuls that do not use torch's ``mm``, ``addmm``, ``bmm`` or ``baddbmm`` on
    CPU, such as fused attention, are corrupted from outside only and need ``inside=0``. The
    recomputation of a suspect row inside a verified op is never corrupted, even if ``persistent``.
    A device and an ``Injector`` cannot be used at the same time.

    Raises:
        ConfigError: An argument is out of range, the model has no such layers, or another injector
            is armed. Later: a training pass runs outside any step (``events.set_step`` or a
            ``Guard`` sets it), or no matmul of a submodule passes a site.

    Source: Ma et al. (2025), tables 1, 2 and 5 to 9, figures 3 to 6, section 6.2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        node: int,
        seed: int = 0,
        setting: str = TRAINING,
        persistent: bool = False,
        rate_scale: float = 1.0,
        step_scale: float = 1.0,
        start_step: int | None = None,
        inside: float = 0.5,
        bound_rms: float | None = 1.0,
        places: Literal["outputs", "everywhere"] = "outputs",
        rhythm: Rhythm | None = None,
    ) -> None:
        self.profile = node_profile(node)
        _check(setting, inside, places)
        for name, value in (("rate_scale", rate_scale), ("step_scale", step_scale)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value!r} must be 0 or a positive number")
        if bound_rms is not None and not bound_rms > 0:
            raise ConfigError(f"bound_rms = {bound_rms!r} must be positive, or None")
        self.model, self.node, self.setting, self.persistent = model, node, setting, persistent
        self.rate_scale = rate_scale
        self._seed, self._inside, self._bound_rms, self._places = seed, inside, bound_rms, places
        self._submodules = submodules(model)
        self._rhythm = rhythm or self.profile.rhythm(setting, step_scale)
        onset = round(self.profile.onset_step * step_scale) if setting == TRAINING else 0
        self.start_step = onset if start_step is None else start_step
        self._rates, self._severities = self._scaled(rate_scale)
        self.strikes: deque[Strike] = deque(maxlen=KEPT_STRIKES)
        self.tallies: dict[_Key, Tally] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bursts: dict[int, int] = {}  # first step of a cycle's burst, within the cycle
        self._sites_passed: set[str] = set()
        self._paused = False
        self._stack = ExitStack()

    def _scaled(self, rate_scale: float) -> tuple[dict[_Key, float], dict[_Key, float]]:
        layers = 1 + max(sub.layer for sub in self._submodules)
        rates: dict[_Key, float] = {}
        severities: dict[_Key, float] = {}
        for name in SUBMODULES:
            direction, part = name.split(".")
            frequencies = self.profile.frequencies(name, layers, self.setting)
            worst = self.profile.severities(name, layers)
            for layer in range(layers):
                rates[layer, direction, part] = frequencies[layer] * rate_scale
                severities[layer, direction, part] = worst[layer]
        return rates, severities

    def rate(self, step: int, layer: int, direction: str, part: str) -> float:
        """Return the mean share of a submodule's values that is wrong in a step."""
        rate = self._rates[layer, direction, part]
        if step < self.start_step or not rate or not self._in_burst(step):
            return 0.0
        spike = self.profile.start_spike and step - self.start_step < SPIKE_STEPS
        rate *= self._rhythm.every / self._rhythm.steps * (SPIKE_FACTOR if spike else 1.0)
        return min(1.0, rate)

    def due(self, step: int) -> bool:
        """Return whether anything can be wrong in a step; otherwise it is computed as usual."""
        return any(self.rate(step, *key) for key in self._rates)

    def _in_burst(self, step: int) -> bool:
        every, steps = self._rhythm.every, self._rhythm.steps
        cycle = step // every
        if cycle not in self._bursts:
            draw = generator("burst", self._seed, self.node, cycle)
            self._bursts[cycle] = int(torch.randint(every - steps + 1, (), generator=draw))
        return self._bursts[cycle] <= step % every < self._bursts[cycle] + steps

    @property
    def struck(self) -> int:
        """Number of wrong values injected so far."""
        return sum(tally.struck for tally in self.tallies.values())

    def __enter__(self) -> "UnhealthyDevice":
        with ExitStack() as stack:
            if self._inside:
                stack.enter_context(protect(self.model, verify=False))
                sites.arm(self._visit)
                stack.callback(sites.disarm)
            struck = outputs(self._submodules)
            if self._places == "everywhere":
                struck = everywhere(self.model, self._submodules)
            for place in struck:
                self._hook(stack, place)
            for sub in self._submodules:
                self._watch(stack, sub)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the injection of wrong values within the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _watch(self, stack: ExitStack, sub: Submodule) -> None:
        """Count the values that a submodule computes, and check that its matmuls pass a site."""
        module = self.model.get_submodule(sub.name)

        def computed(output: torch.Tensor) -> None:
            self._count(output, sub, FORWARD)
            if self._inside and self._on() and sub.last not in self._sites_passed:
                raise ConfigError(
                    f"{sub.name}: none of its matmuls passes a site, so that nothing inside them "
                    "can be struck; give inside=0"
                )
            self._sites_passed.clear()

        def computed_gradient(gradient: torch.Tensor) -> torch.Tensor:
            self._count(gradient, sub, BACKWARD)
            return gradient

        stack.callback(on_output(module, computed).remove)
        stack.callback(on_input_gradient(module, computed_gradient).remove)

    def _hook(self, stack: ExitStack, place: Place) -> None:
        """Corrupt a module's output or its input's gradient through hooks."""
        module = self.model.get_submodule(place.name)

        def output(values: torch.Tensor) -> None:
            self._strike(values, place, FORWARD, place.name, inside=False)

        def input_gradient(gradient: torch.Tensor) -> torch.Tensor:
            if not self._on() or not self._rate_now(place, BACKWARD):
                return gradient
            struck = gradient.clone()  # autograd may have given it to others as well
            self._strike(struck, place, BACKWARD, place.name, inside=False)
            return struck

        stack.callback(on_output(module, output).remove)
        stack.callback(on_input_gradient(module, input_gradient).remove)

    def _on(self) -> bool:
        """Return whether the device errs now, which it does in training steps only."""
        if self._paused:
            return False
        if events.current_step() == -1 and torch.is_grad_enabled():
            raise ConfigError(
                "a training pass outside any step: call events.set_step(step) before it, or train "
                "under a Guard"
            )
        return events.current_step() >= 0

    def _rate_now(self, place: Place | Submodule, direction: str) -> float:
        return self.rate(events.current_step(), place.layer, direction, place.part)

    def _count(self, values: torch.Tensor, sub: Submodule, direction: str) -> None:
        if not self._on():
            return
        tally = self.tallies.setdefault((sub.layer, direction, sub.part), Tally())
        tally.calls += 1
        tally.values += values.numel()
        tally.expected += self._rate_now(sub, direction) * values.numel()

    def _visit(self, stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        """Corrupt the output of a matmul if its site is one of those chosen for injection."""
        if stage != "output" or output is None:
            return
        name, role = site.split("/")[0], site.split("/")[-1]
        self._sites_passed.add(name)
        place = self._inside_place(name, role)
        if place is not None:
            direction = FORWARD if role == "forward" else BACKWARD
            self._strike(output, place, direction, site, inside=True)

    def _inside_place(self, name: str, role: str) -> Place | None:
        for sub in self._submodules:
            if name == sub.name or name.startswith(f"{sub.name}."):
                edge = {"forward": sub.last, "grad_a": sub.first}.get(role)
                struck = name == edge or self._places == "everywhere"
                return Place(name, sub.layer, sub.part) if struck else None
        return None

    def _strike(
        self, values: torch.Tensor, place: Place, direction: str, op: str, *, inside: bool
    ) -> None:
        """Overwrite some values of a tensor with wrong ones, unnoticed by autograd."""
        if not self._on() or not values.numel():
            return
        key = place.layer, direction, place.part
        share = self._inside if inside else 1 - self._inside
        frequency = share * self._rate_now(place, direction)
        if not frequency:
            return
        draw = self._generator(op, direction, inside)
        count = count_wrong(values.numel(), frequency, draw)
        if not count:
            return
        wrong = wrong_values(values, count, self._severities[key], self._bound_rms, draw)
        where = torch.unravel_index(wrong.places, values.shape)
        strike = make_strike(wrong, where, key, op, inside)
        strike.log(self.node)
        self.strikes.append(strike)
        self.tallies.setdefault(key, Tally()).add(strike)
        values.data[where] = wrong.after

    def _generator(self, op: str, direction: str, inside: bool) -> torch.Generator:
        """Return the generator of this call, or of its op and step if the device is persistent."""
        self._calls[op, direction] += 1
        call = 0 if self.persistent else self._calls[op, direction]
        step = events.current_step()
        return generator("strike", self._seed, self.node, op, direction, inside, step, call)


def _check(setting: str, inside: float, places: str) -> None:
    if setting not in SETTINGS:
        raise ConfigError(f"setting = {setting!r} is unknown; valid: {', '.join(SETTINGS)}")
    if not 0 <= inside <= 1:
        raise ConfigError(f"inside = {inside!r} must be a share between 0 and 1")
    if places not in ("outputs", "everywhere"):
        raise ConfigError(f"places = {places!r} is unknown; valid: outputs, everywhere")
