"""What becomes of the findings of the fused attention kernel: events, or an error.

The kernel (``csrc/attention_*.cpp``) looks, recomputes and decides while it runs; here its findings
take the way of every other product's (``ops.gemm.recovery``).
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.abft.gemm import recovery
from holdfast.sites import SiteTuple

# The kernel's decision, and the event that tells of it where nothing is left to be done.
EVENTS = {"repaired": "gemm_fault", "checksum": "checksum_fault"}
UNREPAIRED = {"persistent": "gemm_persistent", "operand": "operand_fault"}


@dataclass(frozen=True)
class FusedCase:
    """A call of the fused kernel that found something."""

    site: SiteTuple
    output: torch.Tensor
    started_s: float = field(default_factory=time.perf_counter)


def resolve_findings(site: SiteTuple, findings: list[dict[str, Any]], output: torch.Tensor) -> None:
    """Report what the kernel found; called by the native core once a call is done.

    Args:
        site: which attention of the program.
        findings: ``verdict`` (``repaired``, ``persistent``, ``checksum``, ``operand``,
            ``nonfinite``, ``overflow`` or ``dismissed``), ``part`` (the matrix or input),
            ``batch``, ``head``, ``query_tile``, ``key_tile`` (−1: all of them), ``row`` and
            ``column`` of the tile, ``rows`` affected, ``corrupted`` and ``repaired`` values.
        output: the call's first result, already repaired.

    Raises:
        UncorrectableFault: a fault was not repaired, or must not be (``correction="detect"``),
            and nobody defers faults.
    """
    case = FusedCase(site, output)
    for finding in findings:
        _resolve(case, finding)


def _resolve(case: FusedCase, finding: dict[str, Any]) -> None:
    verdict, part, where = finding["verdict"], finding["part"], _where(finding)
    if verdict == "dismissed":
        recovery.dismiss(finding["rows"])
    elif verdict == "nonfinite":
        _doubt(case, finding, f"{part} is NaN or INF{where}")
    elif verdict == "overflow":
        _doubt(case, finding, f"{part} of finite operands overflow{where}")
    elif verdict in UNREPAIRED:
        recovery.give_up(case, UNREPAIRED[verdict], f"{part}{where}")
    elif recovery.correction() == "detect" and verdict == "repaired":
        recovery.give_up(case, "gemm_fault", f"{part} differ from their recomputation{where}")
    else:
        place = ("batch", "head", "query_tile", "key_tile")
        recovery.report(
            case,
            EVENTS[verdict],
            rung="correct",
            method="recompute",
            part=part,
            rows=finding["rows"],
            tile=[finding[name] for name in place],
            index=[finding["row"], finding["column"]],
            corrupted=finding["corrupted"],
            repaired=finding["repaired"],
        )


def _doubt(case: FusedCase, finding: dict[str, Any], reason: str) -> None:
    recovery.doubt(case, "nonfinite_input", torch.tensor(finding["rows"]), reason)


def _where(finding: dict[str, Any]) -> str:
    names = {"batch": "batch", "head": "head", "query_tile": "query tile", "key_tile": "key tile"}
    known = [f"{word} {finding[name]}" for name, word in names.items() if finding[name] >= 0]
    return f" in {', '.join(known)}" if known else ""
