"""The injector, which applies the faults of a schedule to a running model, each exactly once."""

import logging
import os
import random
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from holdfast import events, native, sites
from holdfast.abft.gemm.cpu import verify
from holdfast.abft.gemm.reference import as_batch
from holdfast.collectives import interception
from holdfast.errors import ConfigError
from holdfast.events import EventKind
from holdfast.inject.faults import corrupted, write_element
from holdfast.inject.schedule import OUTSIDE_MODELS, Fault
from holdfast.snapshot.layout.flat_buffer import flatten
from holdfast.snapshot.layout.training_state import Stateful

CANDIDATES = 4096
_logger = logging.getLogger("holdfast.inject")
# A drawn fault in a module's output must be one that no later layer can absorb: not finite, or
# larger than the largest true element by this factor.
MODULE_FACTOR = 1e4

# For candidate elements [n, dims] with their values before and after a fault: bool [n], whether the
# change is one that docs/fault_model.md claims to cover.
Covers = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Injector:
    """Injects the faults of one rank and records each one before it takes effect.

    A fault with an ``index`` corrupts that element. Without one the element is drawn at random
    among those for which ``docs/fault_model.md`` claims coverage. In a matmul that is a change of
    more than twice the threshold of a row which it reaches. In a module's output, and in a tile of
    fused attention other than its scores, it is a value that is not finite or 10,000 times larger
    than every true element. In the state, at rest or as the optimizer leaves it, and in what a
    collective delivers it is any element. If no drawn element qualifies, one is corrupted
    nevertheless and recorded as ``below_line``.

    ``with Injector(model, faults) as injector:`` says at its end which faults were never reached;
    within it, each training step runs in ``with injector.step(number):``.

    Args:
        model: The model, not wrapped; faults name modules by their path in it.
        faults: The schedule, for all ranks.
        rank: The rank whose faults are injected.
        fired: Identifiers of faults that were injected already, before this process was restarted.
        optimizer: The optimizer, for faults in its state and in its next step.
        settle: Called before state at rest is corrupted: ``Snapshots.finish``, so that the snapshot
            in flight has copied the right values.

    Raises:
        ConfigError: The model has no module of a fault's path. ``step`` raises it if an ``index``
            is outside of the tensor that it names, or if there is no such tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Sequence[Fault],
        *,
        rank: int = 0,
        fired: Collection[int] = (),
        optimizer: Stateful | None = None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.settle = settle
        self._model, self._optimizer = model, optimizer
        self._modules = dict(model.named_modules())
        self._waiting = [f for f in faults if f.rank == rank and f.identifier not in fired]
        for fault in self._waiting:
            if fault.site == "module" and fault.op not in self._modules:
                raise ConfigError(
                    f"fault {fault.identifier + 1}: {fault.op!r} is not a module of the model; "
                    "name one of model.named_modules()"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._waiting and kind is None:
            missed = ", ".join(f"{f.op or f.kind} at step {f.step}" for f in self._waiting[:5])
            _logger.warning("%d faults were not injected: %s", len(self._waiting), missed)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Inject the faults of a training step while the block runs.

        Fault sites are not armed in steps without faults, which therefore run at full speed.
        """
        due = [fault for fault in self._waiting if fault.step == step]
        for fault in due:
            if fault.kind == "kill_trainer" and not fault.op:
                self._kill(fault)
        self._strike_at_rest([fault for fault in due if fault.site == "rest"])
        self._arm_update([fault for fault in due if fault.site == "update"])
        moved = [fault for fault in due if fault.site == "collective"]
        gemm_faults = [fault for fault in due if fault.site not in ("module", *OUTSIDE_MODELS)]
        if gemm_faults:  # first: it is refused while another injector is armed
            stages = {fault.site for fault in gemm_faults}
            sites.arm(partial(self._visit, gemm_faults), stages)
        hooks = [
            self._modules[fault.op].register_forward_hook(partial(self._visit_module, fault))
            for fault in due
            if fault.site == "module"
        ]
        if moved:
            interception.install()
            interception.striker = partial(self._visit_collective, moved)
        try:
            yield
        finally:
            if moved:
                interception.striker = None
            if gemm_faults:
                sites.disarm()
            for hook in hooks:
                hook.remove()

    def _strike_at_rest(self, faults: Sequence[Fault]) -> None:
        if any(fault in self._waiting for fault in faults):
            self.settle()
            self._strike_state(faults)

    def _strike_state(self, faults: Sequence[Fault]) -> None:
        state = state_at_rest(self._model, self._optimizer)
        for fault in (fault for fault in faults if fault in self._waiting):
            if fault.op not in state:
                raise ConfigError(
                    f"fault {fault.identifier + 1}: there is no tensor {fault.op!r} in the state "
                    f"at step {fault.step}; name one of {', '.join(sorted(state)[:20])} …"
                )
            self._strike(fault, state[fault.op], _any_change)

    def _arm_update(self, faults: Sequence[Fault]) -> None:
        """Strike what the next step of the optimizer leaves, before its hooks see it."""
        if not any(fault in self._waiting for fault in faults):
            return
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ConfigError("a fault at site 'update' needs Injector(optimizer=), one of torch's")
        optimizer: Any = self._optimizer

        def computed() -> None:
            vars(optimizer).pop("_optimizer_step_code", None)  # of this object, not of its class
            self._strike_state(faults)

        optimizer._optimizer_step_code = computed

    def _visit_collective(
        self, faults: Sequence[Fault], name: str, group: object, moved: Callable[[], list[Any]]
    ) -> Callable[[], None] | None:
        """Strike what the first collective of a kind delivers, once it has ended."""
        due = [fault for fault in faults if fault in self._waiting and fault.op == name]
        targets = [tensor for each in moved() for tensor in each.got.values()] if due else []

        def change() -> None:
            for fault in (fault for fault in due if fault in self._waiting):
                self._strike(fault, targets[0], _any_change)

        return change if targets else None

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
                self._strike(fault, target, _exceeds_threshold(stage, gemm, output))

    def _visit_module(self, fault: Fault, module: nn.Module, args: object, output: object) -> None:
        """Inject a fault into a module's output, once; called as a forward hook."""
        if fault not in self._waiting:
            return
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"fault {fault.identifier + 1}: {fault.op} returns {type(output).__name__}, "
                "not a tensor; strike one of its children"
            )
        if fault.kind == "kill_trainer":
            self._kill(fault)
        self._strike(fault, output, _outweighs_all(output))

    def _strike(self, fault: Fault, target: torch.Tensor, covers: Covers) -> None:
        """Corrupt the fault's element, or a drawn one, if possible one that ``covers`` accepts."""
        self._waiting.remove(fault)
        candidates = _candidates(fault, target)
        indices = torch.tensor(candidates)
        before = target.detach()[tuple(indices.T)].expand(len(candidates))
        after = corrupted(before, fault)
        first, below = 0, False
        if fault.index is None:
            covered = covers(indices, before, after)
            below = not bool(covered.any())
            first = 0 if below else int(covered.nonzero()[0])
        index, true, new = candidates[first], before[first], after[first]
        _log(fault, index=list(index), true=float(true), corrupted=float(new), below_line=below)
        write_element(target, index, new)

    def _kill(self, fault: Fault) -> None:
        self._waiting.remove(fault)
        _log(fault)
        os.kill(os.getpid(), signal.SIGKILL)


def state_at_rest(model: nn.Module, optimizer: Stateful | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a model and an optimizer by their paths in a snapshot."""
    parts: Iterable[tuple[str, Stateful | None]] = (("model", model), ("optimizer", optimizer))
    flat = flatten({name: part.state_dict() for name, part in parts if part is not None})
    return dict(zip(flat.paths, flat.tensors, strict=True))


def _any_change(indices: object, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return before != after


def _batch(indices: torch.Tensor) -> torch.Tensor:
    return indices[:, 0] if indices.shape[1] == 3 else torch.zeros_like(indices[:, 0])


def _outweighs_all(values: torch.Tensor) -> Covers:
    """Make a test for new values that are not finite or far above the largest true element."""
    limit = MODULE_FACTOR * values.detach().abs().max().double()
    return lambda indices, before, after: ~(after.double().abs() <= limit)


def _thresholds(gemm: sites.Gemm, product: torch.Tensor) -> torch.Tensor:
    """Return the thresholds of a product's rows, fp64 [batch, M]."""
    given = gemm.addend, gemm.beta, gemm.alpha
    if gemm.statistics.shape[-1] == gemm.a.shape[-1]:  # encoded for the check of a device
        thresholds: torch.Tensor = native.required().device_thresholds(
            product, gemm.a, gemm.b, *given
        )
        return thresholds
    return verify(product, gemm.a, gemm.row_sum, gemm.statistics, *given, gemm.b)[1]


def _exceeds_threshold(stage: str, gemm: sites.Gemm, output: torch.Tensor | None) -> Covers:
    """Make a test for changes that move a row sum by more than twice the row's threshold."""
    if not gemm.a.is_floating_point():
        return lambda indices, before, after: before != after  # integer checks are exact
    if output is not None and not gemm.row_sum.numel():  # a convolution
        return _outweighs_all(output)
    if output is not None and stage in sites.TILE_STAGES:
        if stage not in ("scores", "grad_probabilities"):
            return _outweighs_all(output)
        stage, gemm = "output", replace(gemm, alpha=1.0)  # a tile is scaled after its check
    shape = (*gemm.a.shape[:-1], gemm.b.shape[-1])
    product = output if output is not None else gemm.a.new_zeros(shape)
    threshold = _thresholds(gemm, product)
    if stage == "output":

        def output_covers(
            indices: torch.Tensor, before: torch.Tensor, after: torch.Tensor
        ) -> torch.Tensor:
            limit = 2 * threshold[_batch(indices), indices[:, -2]]
            return ~((after.double() - before.double()).abs() <= limit)

        return output_covers
    # Of each row k of B, or element k of its checksum: the largest |A[i, k]| / threshold[i].
    ratio = as_batch(gemm.a).double().abs() * abs(gemm.alpha) / threshold.unsqueeze(-1)
    weight = ratio.nan_to_num(0.0, 0.0, 0.0).amax(1)  # [batch, K]

    def operand_covers(
        indices: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        batch, row = indices[:, 0], indices[:, 1]
        if stage != "checksum":
            batch, row = _batch(indices), indices[:, -2]
        return ~((after.double() - before.double()).abs() * weight[batch, row] <= 2)

    return operand_covers


def _candidates(fault: Fault, target: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the fault's index, or indices drawn by a generator that the fault seeds."""
    if fault.index is None:
        generator = random.Random(f"{fault.identifier}/{fault.step}/{fault.rank}/{fault.op}")
        drawn = range(CANDIDATES)
        return [tuple(generator.randrange(size) for size in target.shape) for _ in drawn]
    inside = len(fault.index) == target.dim() and all(
        i < size for i, size in zip(fault.index, target.shape, strict=True)
    )
    if not inside:
        raise ConfigError(
            f"fault {fault.identifier + 1}: index {list(fault.index)} is outside the "
            f"{fault.site} of {fault.op}, whose shape is {list(target.shape)}"
        )
    return [fault.index]


def _log(fault: Fault, **values: object) -> None:
    """Record a fault before its effect, so that a killed process does not inject it again."""
    detail = {"fault": fault.identifier, "kind": fault.kind, "site": fault.site, "bit": fault.bit}
    events.record(EventKind.INJECTED, op=fault.op, detail=detail | values, rank=fault.rank)
    if not events.flush():
        raise ConfigError(
            "the ledger does not take the record of an injected fault, which would strike again "
            "after a restart: free the disk, or give another run directory"
        )


def fired_faults(ledger_path: os.PathLike[str], rank: int) -> set[int]:
    """Return the identifiers of the faults that a run's ledger records as injected on a rank."""
    path = Path(ledger_path)
    if not path.exists():
        return set()
    logged = events.read_ledger(path, rank=rank, kind=EventKind.INJECTED)
    return {int(event.detail["fault"]) for _, event in logged}
