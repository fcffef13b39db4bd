"""A training step of a model with a fault in one product, protected or not."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from holdfast import events, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.events import EventKind
from holdfast.inject import Fault, Injector
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.study.attnchecker.subjects import Subject

KINDS = ("inf", "nan", "near_inf", "bitflip")
TOP_BIT = 30  # top bit of the fp32 exponent; values below 2 become huge, INF or NaN


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step with a fault.

    Attributes:
        digest: Digest of the loss and all gradients; empty if an error stopped the step.
        caught: Sites for which a repaired fault was reported.
        unrepaired: Kinds of all other events.
    """

    digest: str
    caught: tuple[str, ...] = ()
    unrepaired: tuple[str, ...] = ()


def gradients(subject: Subject) -> list[torch.Tensor | None]:
    """Compute the loss and the gradients of all parameters and of inputs that require one."""
    wanted: list[torch.Tensor] = [p for p in subject.model.parameters() if p.requires_grad]
    wanted += [tensor for tensor in subject.batch.values() if tensor.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for the same dropout in every run
        loss = subject.loss()
        return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def calm(subject: Subject) -> str:
    """Return the digest of an unprotected step without a fault."""
    return tensors_digest(gradients(subject))


def products(subject: Subject) -> dict[str, tuple[int, ...]]:
    """Return the shape of the (first) output of every product of a step, by site."""
    found: dict[str, tuple[int, ...]] = {}

    def note(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None:
            found.setdefault(site, tuple(output.shape))

    with protect(subject.model, verify=False), sites.injecting(note):
        gradients(subject)
    return found


def attack(
    subject: Subject, site: str, kind: str, index: Sequence[int], *, verify: bool
) -> Outcome:
    """Run a step in which one element of one product's output is overwritten once.

    ``kind`` is one of ``KINDS``, and ``verify`` protects the model. The events of this process are
    cleared.
    """
    bit = TOP_BIT if kind == "bitflip" else None
    fault = Fault(step=0, rank=0, kind=kind, op=site, bit=bit, index=tuple(index))
    events.clear()
    digest = ""
    injection = Injector(subject.model, [fault], rank=0).step(0)
    with protect(subject.model, verify=verify), suppress(UncorrectableFault), injection:
        digest = tensors_digest(gradients(subject))
    injected, *seen = events.recent()
    events.clear()
    assert injected.kind == EventKind.INJECTED, injected
    caught = tuple(event.op for event in seen if event.kind == EventKind.GEMM_FAULT and event.rung)
    others = tuple(
        event.kind for event in seen if event.kind != EventKind.GEMM_FAULT or not event.rung
    )
    return Outcome(digest, caught, others)


def reaching(shape: Sequence[int], length: int) -> tuple[int, ...]:
    """Return an element that no mask hides: last row but one, first column, first sequence.

    It is not in the last row, after which a language model has nothing to predict. ``shape`` is
    that of a product's output, [rows, columns] or [batch · heads, rows, columns], and ``length``
    that of a sequence.
    """
    *batch, rows, _ = shape
    return (*(0 for _ in batch), min(rows, length) - 2, 0)
