"""Findings of the fused attention kernel, which ``abft.policy`` handles.

The C++ kernel (``csrc/attention/``) checks, recomputes and repairs its tiles while it runs; when a
call is done it passes a list of what it found.
"""

from typing import Any

import torch

from holdfast import native
from holdfast.abft.policy import (
    FalseAlarm,
    FaultContext,
    Finding,
    Repair,
    Restored,
    SuspectInput,
    Unrepaired,
    checking,
    decide_each,
)
from holdfast.events import EventKind
from holdfast.sites import SiteTuple

# Verdicts of the kernel, in the order of its C++ enum.
VERDICTS = ("repaired", "persistent", "checksum", "operand", "nonfinite", "overflow", "dismissed")
native.agree("attention_verdicts", VERDICTS)
UNREPAIRED = {"persistent": EventKind.GEMM_PERSISTENT, "operand": EventKind.OPERAND_FAULT}


def resolve_findings(site: SiteTuple, findings: list[dict[str, Any]], output: torch.Tensor) -> None:
    """Report the findings of one call of the kernel, as the native core's handler for them.

    Args:
        site: Site of the attention in the program.
        findings: Each has ``verdict`` (one of ``VERDICTS``), ``part`` (the matrix or input),
            ``batch``, ``head``, ``query_tile``, ``key_tile`` (−1: all of them), ``row`` and
            ``column`` within the tile, the number of ``rows`` affected, and the ``corrupted`` and
            ``repaired`` values.
        output: The first result of the call, already repaired.

    Raises:
        UncorrectableFault: A fault was not repaired, or must not be (``correction="detect"``), and
            no caller is collecting faults.
    """
    context = FaultContext(site, device=str(output.device))
    with checking(context):
        decide_each(context, (_judged(finding) for finding in findings))


def _judged(finding: dict[str, Any]) -> Finding:
    """Translate one finding of the kernel into a finding of ``abft.policy``."""
    verdict, part, where = finding["verdict"], finding["part"], _where(finding)
    if verdict == "dismissed":
        return FalseAlarm(finding["rows"])
    if verdict == "nonfinite":
        return SuspectInput(
            EventKind.NONFINITE_INPUT, finding["rows"], f"{part} is NaN or INF{where}"
        )
    if verdict == "overflow":
        reason = f"{part} of finite operands overflow{where}"
        return SuspectInput(EventKind.NONFINITE_INPUT, finding["rows"], reason)
    if verdict in UNREPAIRED:
        return Unrepaired(UNREPAIRED[verdict], f"{part}{where}")
    place = ("batch", "head", "query_tile", "key_tile")
    detail = {
        "method": "recompute",
        "part": part,
        "rows": finding["rows"],
        "tile": [finding[name] for name in place],
        "index": [finding["row"], finding["column"]],
        "corrupted": finding["corrupted"],
        "repaired": finding["repaired"],
    }
    if verdict == "checksum":
        return Restored(EventKind.CHECKSUM_FAULT, detail)
    refusal = f"{part} differ from their recomputation{where}"
    return Repair(EventKind.GEMM_FAULT, detail, lambda: None, refusal)  # repaired by the kernel


def _where(finding: dict[str, Any]) -> str:
    names = {"batch": "batch", "head": "head", "query_tile": "query tile", "key_tile": "key tile"}
    known = [f"{word} {finding[name]}" for name, word in names.items() if finding[name] >= 0]
    return f" in {', '.join(known)}" if known else ""
