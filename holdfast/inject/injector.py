"""Strikes a running model with the faults of a schedule, each exactly once."""

import os
import random
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from holdfast import events, sites
from holdfast.abft.gemm.passes import verify
from holdfast.abft.gemm.reference import as_batch
from holdfast.errors import ConfigError
from holdfast.inject.faults import corrupted, write_element
from holdfast.inject.schedule import Fault

CANDIDATES = 4096
# A drawn fault in a module's output is one that no later layer can absorb: it outweighs the
# largest true element by this factor, or is not finite.
MODULE_FACTOR = 1e4


class Injector:
    """Injects the faults of one rank; every one is logged before it takes effect.

    A fault with an ``index`` strikes that element. Without one the element is drawn at random
    among those for which ``docs/fault_model.md`` claims coverage: in a matmul, a change of more
    than twice the threshold of a row it reaches; in a module's output, and in a tile of fused
    attention but its scores, a value that is not finite or outweighs every true element
    ten-thousandfold. If no drawn element qualifies, one is struck all the same and logged as
    ``below_line``.

    Args:
        model: the model, not wrapped; modules are struck by their path in it.
        faults: the schedule, for all ranks.
        rank: whose faults to inject.
        fired: identifiers of faults that struck already, in an earlier life of this run.

    Raises:
        ConfigError: the model has no module of that path; later, if an ``index`` does not lie in
            the tensor it is to strike.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Sequence[Fault],
        *,
        rank: int,
        fired: Collection[int] = (),
    ) -> None:
        self._modules = dict(model.named_modules())
        self._waiting = [f for f in faults if f.rank == rank and f.identifier not in fired]
        for fault in self._waiting:
            if fault.site == "module" and fault.op not in self._modules:
                raise ConfigError(
                    f"fault {fault.identifier + 1}: {fault.op!r} is not a module of the model; "
                    "name one of model.named_modules()"
                )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Inject the faults of a training step while the block runs.

        Sites stay unarmed in steps without faults, so that a healthy step pays nothing.
        """
        due = [fault for fault in self._waiting if fault.step == step]
        for fault in due:
            if fault.kind == "kill_trainer" and not fault.op:
                self._kill(fault)
        gemm_faults = [fault for fault in due if fault.site != "module"]
        if gemm_faults:  # first: it is refused while another injector is armed
            sites.arm(lambda *visit: self._visit(gemm_faults, *visit))
        hooks = [
            self._modules[fault.op].register_forward_hook(self._module_hook(fault))
            for fault in due
            if fault.site == "module"
        ]
        try:
            yield
        finally:
            if gemm_faults:
                sites.disarm()
            for hook in hooks:
                hook.remove()

    def _visit(
        self,
        faults: list[Fault],
        stage: str,
        site: str,
        gemm: sites.Gemm,
        output: torch.Tensor | None,
    ) -> None:
        for fault in faults:
            if fault in self._waiting and fault.site == stage and fault.op == site:
                if fault.kind == "kill_trainer":
                    self._kill(fault)
                target = {"operand": gemm.b, "checksum": gemm.row_sum}.get(stage, output)
                assert target is not None
                self._strike(fault, target, _reaches(stage, gemm, output))

    def _module_hook(self, fault: Fault) -> "_ModuleHook":
        return _ModuleHook(self, fault)

    def strike_module(self, fault: Fault, output: torch.Tensor) -> None:
        """Inject into a module's output, once."""
        if fault in self._waiting and fault.kind == "kill_trainer":
            self._kill(fault)
        if fault in self._waiting:
            self._strike(fault, output, _outweighing(output))

    def _strike(self, fault: Fault, target: torch.Tensor, reach: "_Reach") -> None:
        self._waiting.remove(fault)
        index, below = fault.index, False
        if index is None:
            index, below = _draw(fault, target, reach)
        elif len(index) != target.dim() or any(
            i >= size for i, size in zip(index, target.shape, strict=True)
        ):
            raise ConfigError(
                f"fault {fault.identifier + 1}: index {list(index)} is outside the "
                f"{fault.site} of {fault.op}, whose shape is {list(target.shape)}"
            )
        true = target.detach()[index]
        new = corrupted(true, fault)
        _log(fault, index=list(index), true=float(true), corrupted=float(new), below_line=below)
        write_element(target, index, new)

    def _kill(self, fault: Fault) -> None:
        self._waiting.remove(fault)
        _log(fault)
        os.kill(os.getpid(), signal.SIGKILL)


class _ModuleHook:
    def __init__(self, injector: Injector, fault: Fault) -> None:
        self._injector, self._fault = injector, fault

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"fault {self._fault.identifier + 1}: {self._fault.op} returns "
                f"{type(output).__name__}, not a tensor; strike one of its children"
            )
        self._injector.strike_module(self._fault, output)


class _Reach:
    """Whether a change at some element is one the fault model claims to cover.

    ``weight`` [elements of the struck dimension, or None] turns a change of an element into the
    largest change of a row sum relative to ``limit``.
    """

    def __init__(
        self, weight: torch.Tensor | None, limit: torch.Tensor, *, by_size: bool = False
    ) -> None:
        self._weight, self._limit, self._by_size = weight, limit, by_size

    def covers(
        self, indices: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """For candidate elements [n, dims] with their values before and after, bool [n]."""
        before, after = before.double(), after.double()
        change = after.abs() if self._by_size else (after - before).abs()
        if self._weight is not None:  # per row k of B: the largest |A[i, k]| / threshold[i]
            change = change * self._weight[_batch(indices), indices[:, -2]]
            return ~(change <= 2)
        limit = self._limit
        if not self._by_size:
            limit = 2 * limit[_batch(indices), indices[:, -2]]
        return ~(change <= limit)


def _batch(indices: torch.Tensor) -> torch.Tensor:
    return indices[:, 0] if indices.shape[1] == 3 else torch.zeros_like(indices[:, 0])


def _outweighing(values: torch.Tensor) -> "_Reach":
    limit = MODULE_FACTOR * values.detach().abs().max().double()
    return _Reach(None, limit, by_size=True)


def _reaches(stage: str, gemm: sites.Gemm, output: torch.Tensor | None) -> "_Reach":
    if not gemm.a.is_floating_point():
        return _AnyChange(None, torch.zeros(()))
    if output is not None and stage in sites.TILE_STAGES:
        if stage not in ("scores", "grad_probabilities"):
            return _outweighing(output)
        stage, gemm = "output", replace(gemm, alpha=1.0)  # a tile is scaled after its check
    shape = (*gemm.a.shape[:-1], gemm.b.shape[-1])
    product = output if output is not None else gemm.a.new_zeros(shape)
    encoding = (gemm.row_sum, gemm.statistics)
    threshold = verify(product, gemm.a, *encoding, gemm.addend, gemm.beta, gemm.alpha, gemm.b)[1]
    if stage == "output":
        return _Reach(None, threshold)
    ratio = as_batch(gemm.a).double().abs() * abs(gemm.alpha) / threshold.unsqueeze(-1)
    weight = ratio.nan_to_num(0.0, 0.0, 0.0).amax(1)  # [batch, K]
    if stage == "checksum":
        return _ChecksumReach(weight, threshold)
    return _Reach(weight, threshold)


class _AnyChange(_Reach):
    """Integers: every change is covered."""

    def covers(
        self, indices: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        return before != after


class _ChecksumReach(_Reach):
    """A checksum vector has an element for each row of B: [batch, K]."""

    def covers(
        self, indices: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        assert self._weight is not None
        change = (after - before).abs() * self._weight[indices[:, 0], indices[:, 1]]
        return ~(change <= 2)


def _draw(fault: Fault, target: torch.Tensor, reach: _Reach) -> tuple[tuple[int, ...], bool]:
    """A covered element drawn by the fault's own generator, and whether none was found."""
    generator = random.Random(f"{fault.identifier}/{fault.step}/{fault.rank}/{fault.op}")
    picks = [[generator.randrange(size) for size in target.shape] for _ in range(CANDIDATES)]
    indices = torch.tensor(picks)
    before = target.detach()[tuple(indices.T)]
    covered = reach.covers(indices, before, corrupted(before, fault))
    first = int(covered.nonzero()[0]) if covered.any() else 0
    return tuple(picks[first]), not bool(covered.any())


def _log(fault: Fault, **values: object) -> None:
    """Before the effect: a kill leaves no time after it, and no fault may strike twice."""
    detail = {"fault": fault.identifier, "kind": fault.kind, "site": fault.site, "bit": fault.bit}
    events.record("injected", op=fault.op, detail=detail | values, rank=fault.rank)


def fired_faults(ledger_path: os.PathLike[str], rank: int) -> set[int]:
    """Identifiers of the faults that a run's ledger says have struck a rank."""
    path = Path(ledger_path)
    if not path.exists():
        return set()
    logged = events.read_ledger(path, rank=rank, kind="injected")
    return {int(event.detail["fault"]) for _, event in logged}
