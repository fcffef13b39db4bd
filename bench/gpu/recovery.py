"""The stage that trains under a Guard with faults in products."""

import os
from collections.abc import Collection, Iterator
from contextlib import nullcontext

import torch

from bench.gpu.models import SIXTH, TOY_GPT2, Training
from bench.gpu.stage import Machine, Row, demand, unchecked
from bench.gpu.strike import Added, beyond_all
from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.guard import Guard
from holdfast.sites import injecting

GUARDED_STEPS = 5


def guarded(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Train under the Guard with a fault in each kind of product; compare the weights."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        calm, found = _trained(machine, None)
        demand(found == [], f"a run without faults has events: {found}")
        for role in ("forward", "grad_a", "grad_b"):
            digest, found = _trained(machine, role)
            demand(found == ["gemm_fault", "rerun"], f"a fault in {role} led to {found}")
            demand(digest == calm, f"a fault in {role} changed the weights")
            struck, _ = _trained(machine, role, verify=False)
            demand(struck != calm, f"without checks a fault in {role} changes nothing")
            yield {"case": role, "reruns": 1}
    finally:
        torch.use_deterministic_algorithms(False)


def _trained(machine: Machine, role: str | None, *, verify: bool = True) -> tuple[str, list[str]]:
    """Train; return the digest of the weights, and the kinds of the events."""
    events.clear()
    shape = TOY_GPT2 if machine.rehearsed else SIXTH
    side = Training(machine, shape, 2, "eager")
    guard = Guard(side.model, side.optimizer)

    def run(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(machine.device.type, torch.bfloat16):
            loss: torch.Tensor = side.model(batch)
        loss.backward()
        return loss

    with machine.protected(side.model) as protection:
        site = f"blocks.0.mlp.up/addmm/{role}"
        for step in range(GUARDED_STEPS):
            with nullcontext() if verify else unchecked(protection):
                if role is not None and step == GUARDED_STEPS // 2:
                    with injecting(Added(beyond_all, site=site, only=1)) as fault:
                        guard.step(run, side.batch)
                    demand(fault.struck == 1, f"{site} is no product of the model")
                else:
                    guard.step(run, side.batch)
    kinds = [str(event.kind) for event in events.recent()]
    return tensors_digest(list(side.model.parameters())), kinds
