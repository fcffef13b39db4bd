"""Every way in which values go wrong on their way through a step, and who finds it."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from guard_cases import STEPS, STRUCK, Run, kinds
from struck import struck

from holdfast import events
from holdfast.protection import protect

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def flipped(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Flip bits of the first element."""
    changed = values.clone()
    changed.view(-1)[:1].view(torch.int32).bitwise_xor_(bits)
    return changed


# Of the right values, and those of the step before.
CHANGES: dict[str, Change] = {
    "single_bitflip": lambda now, before: flipped(now, 1 << 21),
    "multi_bitflip": lambda now, before: flipped(now, 0b11 << 20),
    "set_value": lambda now, before: torch.cat([torch.full_like(now[:1], 0.5), now[1:]]),
    "scale": lambda now, before: 1.5 * now,
    "noise": lambda now, before: now + 0.1 * torch.linspace(-1, 1, now.numel()).view_as(now),
    "sign_flip": lambda now, before: torch.cat([-now[:1], now[1:]]),
    "stale_state": lambda now, before: before,
    "drop": lambda now, before: torch.cat([torch.zeros_like(now[:1]), now[1:]]),
    "duplicate": lambda now, before: torch.cat([now[1:2], now[1:]]),
    "reorder": lambda now, before: now.flip(0),
}
SURFACES = ("output of a module", "gradient of an activation", "gradient of a weight", "batch")


def struck_run(change: Change, surface: str, audit: float | None) -> Run:
    """A run one of whose passes, the first of step ``STRUCK``, gets changed values."""
    run, before, left = Run(dropout=0.0), {}, [STRUCK]

    def altered(values: torch.Tensor) -> torch.Tensor:
        now, step = values.detach().clone(), events.current_step()
        old, before["values"] = before.get("values", now), now
        if step not in left:
            return values
        left.remove(step)
        return change(values, old)

    def in_place(_: object, args: object, out: torch.Tensor) -> None:
        with torch.no_grad():  # autograd notices no fault
            out.copy_(altered(out))

    plain = run.forward_backward
    if surface == "output of a module":
        run.model.norm.register_forward_hook(in_place)
    elif surface == "gradient of an activation":
        run.model.norm.register_full_backward_hook(lambda _, grads, out: (altered(grads[0]),))
    elif surface == "gradient of a weight":
        run.model.up.weight.register_hook(altered)
    else:
        run.forward_backward = lambda batch: plain((batch[0], altered(batch[1])))  # type: ignore
    if audit is None:
        return run.bare()
    run.guarded(audit=audit)
    return run


@pytest.fixture(scope="module")
def right() -> str:
    return Run(dropout=0.0).bare(STEPS).digest()


# Every change on two surfaces, every surface with half of the changes.
PLACED = [
    (name, surface)
    for number, name in enumerate(CHANGES)
    for place, surface in enumerate(SURFACES)
    if (number + place) % 2 == 0
]


@for_each(("name", "surface"), PLACED)
def test_an_audit_repairs_it_and_without_a_guard_it_gets_through(
    name: str, surface: str, right: str
) -> None:
    assert struck_run(CHANGES[name], surface, None).digest() != right
    events.clear()
    assert struck_run(CHANGES[name], surface, 1.0).digest() == right
    assert kinds() == ["rerun"]
    assert events.recent()[0].detail["verdict"] == "transient"
    events.clear()


@for_each("name", CHANGES)
def test_in_a_product_it_is_repaired_at_once(name: str, right: str) -> None:
    for verify in (False, True):
        run, before = Run(dropout=0.0), {}

        def change(values: torch.Tensor, before: dict[str, torch.Tensor] = before) -> torch.Tensor:
            return CHANGES[name](values.clone(), before["values"])

        run.model.up.register_forward_hook(
            lambda _, args, out, before=before: before.__setitem__("values", out.detach().clone())
        )
        site = {"site": "up/addmm/forward", "nth": STRUCK}
        with protect(run.model, verify=verify), struck((slice(None),), change, **site):
            run.bare()
        assert (run.digest() == right) == verify
    assert kinds() == ["gemm_fault"]
    events.clear()
