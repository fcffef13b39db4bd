"""Verdicts that the checks of products on a device leave in its ledger.

A check raises the slot of its site to the bits of the largest ``|D| / T`` of a row. The host reads
all slots at once, with the loss and the norm of the gradients, when these are to be used.
"""

import math
from collections.abc import Callable, Collection, Sequence
from weakref import WeakKeyDictionary

import torch

from holdfast import native
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.suspects import POSSIBLE_EDIT
from holdfast.abft.policy import FaultContext, Finding, SuspectInput, Unrepaired, decide_each
from holdfast.events import EventKind
from holdfast.sites import SiteTuple

LIMIT = 0x3F800000  # the bits of 1.0; a larger slot means that a row exceeded its threshold

_read: dict[torch.device, int] = {}  # checks of each device that were queued when it was last read
_settled: set[torch.device] = set()  # devices that were read since the last optimizer's step

# For each reader of verdicts, a function that returns the modules whose verdicts it will read.
_claims: WeakKeyDictionary[object, Callable[[], Collection[int]]] = WeakKeyDictionary()


def claim(owner: object, modules: Callable[[], Collection[int]]) -> None:
    """Reserve the verdicts on some modules for the object that reads them, while it exists.

    Args:
        owner: The reader: the verifier of a Guard, or a protection whose optimizer has stepped.
        modules: Returns the numbers of its modules; must not refer to the owner.
    """
    _claims[owner] = modules


def concerns(owner: object, module: int) -> bool:
    """Return whether an owner is to read the verdicts on a module: it claimed it, or nobody did.

    So a teacher that a guarded pass runs is judged with the pass.
    """
    claims = list(_claims.items())
    return module in _claims[owner]() or not any(module in claimed() for _, claimed in claims)


def devices() -> list[torch.device]:
    """Return the devices on which products were verified, or may be."""
    return native.core.ledger_devices() if native.core is not None else []


def settle_unread(concerned: Callable[[int], bool], *, replays: bool = True) -> None:
    """Settle all ledgers if a device verified products since its ledger was last read.

    Of replays of a captured graph the host knows nothing. With ``replays`` and such graphs each
    call reads the ledger, except the first after one of ``settle``.
    """
    for device in devices():
        checks, captured = native.required().checks_queued(device)
        if _read.get(device, 0) != checks or (replays and captured and device not in _settled):
            try:
                settle(concerned)
            finally:
                _settled.clear()
            return
    if replays:
        _settled.clear()


def settle(concerned: Callable[[int], bool], values: Sequence[torch.Tensor] = ()) -> list[float]:
    """Read values and the ledgers, in one transfer a device, and decide about suspect products.

    Args:
        concerned: Returns whether the caller is about to use products of a module, whose number is
            that in ``sites.module_names``, or 0 for products outside of modules. Verdicts on the
            products of other modules stay in the ledger.
        values: Floating-point tensors to be read with them, of any shape.

    Returns:
        The elements of all values.

    Guarantees: a product whose check was queued before on the current stream, or on one that it
    waits for, is judged. A suspect product is an unrepaired fault, as the device kept nothing to
    repair it from: a Guard repeats the step. NaN and INF that its operands explain are a suspect
    input, which a repeated step confirms. Kept checksums of weights that are not equal
    to their second copies are dropped; those of a weight that changed in memory stay, so that the
    fault repeats until the weight is restored.

    Raises:
        UncorrectableFault: A product was suspect, and no caller is ``collecting`` faults.
    """
    apart = [value.detach().reshape(-1) for value in values]
    numbers: dict[int, list[float]] = {}
    for device in {*devices(), *(value.device for value in apart)}:
        here = [index for index, value in enumerate(apart) if value.device == device]
        read = _transfer(device, [apart[index] for index in here], concerned)
        numbers |= dict(zip(here, read, strict=True))
    return [number for index in range(len(apart)) for number in numbers[index]]


def _transfer(
    device: torch.device, values: list[torch.Tensor], concerned: Callable[[int], bool]
) -> list[list[float]]:
    if device not in devices():
        return [value.tolist() for value in values]
    checks, _ = native.required().checks_queued(device)
    with torch.no_grad():
        ledger, sites = native.required().ledger(device)
        words = [value.to(torch.float64).view(torch.int32) for value in values]
        host = torch.cat([*words, ledger]).cpu()
    _read[device] = checks
    _settled.add(device)
    lengths = [len(each) for each in words]
    *parts, slots = host.split([*lengths, len(ledger)])
    _judge(device, ledger, slots, sites, concerned)
    return [part.clone().view(torch.float64).tolist() for part in parts]


def _judge(
    device: torch.device,
    ledger: torch.Tensor,
    slots: torch.Tensor,
    sites: list[SiteTuple],
    concerned: Callable[[int], bool],
) -> None:
    over = (slots > LIMIT).nonzero().flatten().tolist()
    ours = [index for index in over if concerned(sites[index][0])]
    if len(ours) < len(over):
        _read.pop(device, None)  # the others are still to be read
    if not ours:
        return
    with torch.no_grad():
        ledger[torch.tensor(ours, device=device)] = 0
    damaged = interception().drop_damaged_encodings()
    ratios = slots.view(torch.float32)
    for index in ours:
        interception().note_suspect(*sites[index])
        context = FaultContext(sites[index], device=str(device))
        decide_each(context, [_finding(sites[index][1], float(ratios[index]), damaged)])


def _finding(op: str, ratio: float, damaged: int) -> Finding:
    if op.startswith("sdpa") and ratio < float("inf"):
        reason = "rows stayed suspect though their tiles were computed again"
        return Unrepaired(EventKind.GEMM_FAULT, reason, {})
    if damaged:
        reason = f"{damaged} kept checksums had changed, and were dropped"
        return Unrepaired(EventKind.CHECKSUM_FAULT, reason, {"ratio": ratio})
    if math.isnan(ratio):
        reason = "the result is NaN or INF, or larger than its finite operands allow"
        return Unrepaired(EventKind.GEMM_FAULT, reason, {})
    if ratio < float("inf"):
        reason = f"a row exceeded its threshold {ratio:.3g} times; if it repeats, {POSSIBLE_EDIT}"
        return Unrepaired(EventKind.GEMM_FAULT, reason, {"ratio": ratio})
    return SuspectInput(EventKind.NONFINITE_INPUT, 1, "a row, or its prediction, is NaN or INF")
