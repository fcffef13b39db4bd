"""Plausible defects of the methods that the studies measure: each must turn verdicts.

Each study runs at its smallest size, as it is and with the defect. Times of such runs say nothing:
studies of time are given those by which the paper's values hold, and the defect makes them worse.
``python tests/lab/study/test_mutations.py FILE`` writes what docs/reproduction.md counts.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.inject.statistics import Rate
from holdfast.planner.attention import modelled_costs
from holdfast_lab.cli.study import KEPT
from holdfast_lab.study import REGISTRY, Settings, Unwatched, Verdict
from holdfast_lab.study.dlrm import gemm_overhead
from holdfast_lab.study.reproduction import Key, Record, joined, read_records
from holdfast_lab.study.sdc.paper_tasks import TASKS
from holdfast_lab.study.sdc.spikes import OVERFLOWS, Spike

HELD = (Verdict.REPRODUCED, Verdict.CALIBRATION)
MAY_HOLD = (*HELD, Verdict.UNDECIDED)  # too few trials at the smallest size
Make = Callable[[Any], Any]  # from the value of a name to what takes its place
Swaps = Mapping[str, Make]  # by name in the study's module, or ``module:name``
# What is wrong, the study, the sources whose verdicts must turn, the defect, what is given.
Mutation = tuple[str, str, str, Swaps] | tuple[str, str, str, Swaps, Swaps]


def verdicts_of(study: str, swaps: Swaps) -> dict[Key, Verdict]:
    """Run a study at its smallest size with these swaps."""
    with pytest.MonkeyPatch.context() as patch:
        for place, make in swaps.items():
            place = place if ":" in place else f"{REGISTRY[study].module}:{place}"
            patch.setattr(place.replace(":", "."), make(resolve_name(place)))
        rows = [row.as_dict() for row in REGISTRY[study].run(Settings("tiny"), Unwatched())]
    groups = Record(REGISTRY[study], Path(), {"rows": rows}).groups()
    return {key: joined([one for _, one in cells]) for key, cells in groups.items()}


def outcome(mutation: Mutation) -> Iterator[dict[str, Any]]:
    """Yield each verdict that must turn; a source that did not hold has not turned."""
    (name, study, sources, swaps), given = mutation[:4], mutation[4] if len(mutation) > 4 else {}
    before, after = verdicts_of(study, given), verdicts_of(study, {**given, **swaps})
    held = [key for key in before if before[key] in MAY_HOLD]
    for source in dict.fromkeys(key[0] for key in held) if sources == ALL else sources.split("; "):
        for key in [key for key in held if key[0] == source] or [(source, "did not hold")]:
            row = {"study": study, "mutation": name, "source": key[0], "quantity": key[1]}
            turned = key in before and after.get(key) not in MAY_HOLD
            yield row | {"before": before.get(key), "after": after.get(key), "turned": turned}


class OneProduct:
    def forward(self, tokens: object, multiply: Callable[..., torch.Tensor]) -> None:
        multiply("scores", *torch.randn(2, 64, 64))


def fixed(value: object) -> Make:
    return lambda before: (lambda *_, **__: value) if callable(before) else value


def forced(**options: object) -> Make:
    return lambda before: lambda *args, **given: before(*args, **given | options)


def bounds(factor: Callable[[Any], float], *members: str) -> Swaps:
    scaled = lambda f: lambda self, product: f(self, product) * factor(product)  # noqa: E731
    return {f"holdfast.abft.thresholds.{name}.__call__": scaled for name in members}


def slower(percent: float) -> Make:
    names = "protected, %", "as sections, %", "checked by torch operators, %"
    return fixed((1.0, dict(zip(names, (percent, percent, 60.0), strict=True))))


def costs(factor: float) -> Make:
    return lambda _: lambda size, *_: modelled_costs(size, 0.11 * factor, 0.07 * factor)


def ratios(percent: float) -> Make:
    return fixed((1e-5, dict.fromkeys(gemm_overhead.VARIANTS, 1 + percent / 100)))


# fmt: off
V, A = "vabft:VAbft", "aabft:AAbft"
ONE = {"PAPER_MODELS": fixed(("bert",))}
NODES = {"NODES": fixed((1, 10, 13))}  # one that errs, one with a spike, one with an onset
WIDER = lambda f: lambda *args: {name: 1e3 * one for name, one in f(*args).items()}  # noqa: E731
NOISY = lambda f: lambda *both: f(*both) + 1e-9  # noqa: E731
UNCHECKED = lambda f: lambda model, **_: f(model, verify=False)  # noqa: E731
TINY = lambda _: 1e-3  # noqa: E731
NONE = lambda f: lambda *args: torch.zeros_like(f(*args))  # noqa: E731
GROWING = lambda f: lambda a, b: replace(f(a, b), apart=f(a, b).apart * len(a) / 16)  # noqa: E731
UNBOUNDED = {"device_for": forced(bound_rms=1e9), "WRONG_PER_STEP": fixed(1e4)}
INVERTED = lambda f: lambda *both: Rate(f(*both).trials - f(*both).count, f(*both).trials)  # noqa: E731
MIDDLE = "holdfast_lab.study.sdc.spikes:MIDDLE"
SAVED = lambda f: lambda self: (f(self), 2.0)[1]  # noqa: E731
FBGEMM = fixed(SimpleNamespace(core=SimpleNamespace(embedding_fbgemm=lambda: True)))
ALL = "all that hold"
MUTATIONS: tuple[Mutation, ...] = (
    ("errors that grow with the size", "vabft.emax", ALL, {"relative_errors": GROWING}),
    *(("bounds times ten, errors of a narrower accumulator", f"vabft.tightness-{precision}", ALL,
       bounds(lambda _: 10.0, V, A) | {"residuals": WIDER, "exact_residuals": WIDER})
      for precision in ("fp64", "fp32", "bf16")),
    ("errors that grow with the size", "vabft.fp8", ALL,
     {"relative_error": lambda f: lambda a, *b: f(a, *b) * len(a) / 16}),
    ("V-ABFT's statistics ten times as slow", "vabft.cost", ALL,
     {"cost_ratio": fixed(0.2)}, {"cost_ratio": fixed(2.0)}),
    ("V-ABFT's bounds times ten", "vabft.factor", ALL, bounds(lambda _: 10.0, V)),
    ("bounds of a variance", "vabft.scaling", "tables 4 to 6, growth",
     bounds(lambda product: product.columns, V, A)),
    ("bounds divided by a thousand", "vabft.false-positives", ALL, bounds(TINY, V, A)),
    ("bounds divided by a thousand", "vabft.coherent", ALL, bounds(TINY, V, A)),
    ("bounds divided by a thousand", "vabft.real-weights", ALL, bounds(TINY, V),
     {"model_directory": fixed(""), "passages": fixed(""), "MiniLM.load": fixed(OneProduct())}),
    ("bounds divided by a thousand", "vabft.trained-models", ALL, bounds(TINY, V)),
    ("bounds K times as large", "vabft.detection", "table 8, bits 10 to 14",
     bounds(lambda product: 1e3 * product.inner, V)),
    ("a softmax of thirty operations", "attnchecker.gemm-share", ALL,
     {"SOFTMAX_OPERATIONS": fixed(30)}, ONE),
    ("rows taken for columns", "attnchecker.propagation", ALL,
     {"pattern": lambda f: lambda clean, faulty: f(clean.mT, faulty.mT)}, ONE),
    ("products are not verified", "attnchecker.coverage", ALL,
     {"attack": forced(verify=False)}, {"FAMILIES": lambda before: {"bert": before["bert"]}}),
    ("no row is suspected", "attnchecker.detection", ALL,
     {"holdfast_lab.campaign.workload:Computed.suspects": NONE,
      "holdfast_lab.campaign.end_to_end:protect": UNCHECKED}, ONE),
    ("the element beside the wrong one is rebuilt", "attnchecker.checksum-repair", ALL,
     {"holdfast.abft.checksums.extreme:_locate":
      lambda f: lambda found: (f(found) + 1) % found.encoding.count}, ONE),
    ("training is not verified", "attnchecker.loss", ALL, {"protect": UNCHECKED}, ONE),
    ("checks take six times as long", "attnchecker.overhead", ALL,
     {"overheads": slower(30.0)}, ONE | {"overheads": slower(5.0)}),
    ("a third of the encoder's speed, four times a GEMM's", "attnchecker.encoding", ALL,
     {"throughput": fixed([30.0, 20.0, 100.0])}, {"throughput": fixed([95.0, 5.0, 100.0])}),
    ("all is always checked, at ten times the cost", "attnchecker.frequencies", ALL,
     {"measured_costs": costs(10.0),
      "plan_frequencies": lambda f: lambda *args: replace(f(*args), cost=f(*args).full_cost)},
     {"measured_costs": costs(1.0)}),
    ("a correction takes half a step, a checkpoint nothing", "attnchecker.recovery", ALL,
     {"correction_s": fixed([0.5]), "checkpoint_s": fixed((0.0, 0.0))}, ONE
     | {"median_s": fixed(1.0), "correction_s": fixed([0.002]), "checkpoint_s": fixed((0.9, 0.9))}),
    ("values are compared with others", "sdc.submodules", ALL,
     {"holdfast_lab.study.sdc.lockstep:Mismatches.add":
      lambda f: lambda self, healthy, values: f(self, healthy, values * 1.01)},
     {"NODES": fixed((1, 7, 10, 13))}),
    ("equal gradients differ", "sdc.gradients", ALL, {"distance": NOISY}, NODES),
    ("equal weights differ, errors have no bound", "sdc.drift",
     "section 3.1; section 6.2, node 13; figure 6, losses",
     {"distance": NOISY, **UNBOUNDED}, NODES),
    ("the device never errs", "sdc.drift", "figure 6, parameters",
     {"holdfast_lab.emulation.device:UnhealthyDevice._on": fixed(False)}, NODES),
    ("errors without a bound", "sdc.finetune", "section 6.2, disagreement", UNBOUNDED, NODES),
    ("equal answers count as different", "sdc.finetune",
     "; ".join(f"{task.source('disagreement')}, silent" for task in TASKS),
     {"_differing": INVERTED},
     {"NODES": fixed((2, 10, 13)), "_judged": lambda _: lambda found, _: found}),
    ("every answer of a node counts as right", "sdc.finetune", "table 5, RACE, accuracy",
     {"_right": lambda f: lambda outcome, test:
      Rate(len(test), len(test)) if outcome.device else f(outcome, test)}, {"NODES": fixed((2,))}),
    ("each model is ruined at the first step", "sdc.finetune",
     "figure 7, other nodes; section 6.2, losses on OpenbookQA",
     {"reported": fixed([Spike(0, OVERFLOWS)])}, {"NODES": fixed((1, 13))}),
    ("the spike in the middle comes late", "sdc.finetune", "figure 7, after a spike in the middle",
     {MIDDLE: fixed(0.9)}, {"NODES": fixed((6, 7)), MIDDLE: fixed(0.2)}),
    ("losses have no spikes", "sdc.finetune",
     "figure 7, spikes; table 3, CosmosQA, ruined; table 5, RACE, ruined",
     {"reported": fixed([])}, {"NODES": fixed((6, 7)), MIDDLE: fixed(0.2)}),
    ("bounds divided by a million", "sdc.abft", ALL, bounds(lambda _: 1e-6, "norm:Norm"), NODES),
    ("bounds divided by a billion", "sdc.bf16", "appendix D.4, fp32",
     {"bound": lambda f: lambda *args: 1e-9 * f(*args)}),
    ("bounds times a million", "sdc.bf16", "appendix D.4, bf16, largest elements",
     {"bound": lambda f: lambda *args: 1e6 * f(*args)}, {"residual": fixed(1e4)}),
    ("int8 products are suspected only where clean", "dlrm.gemm-detection", ALL,
     {"Target._count": lambda f: lambda self, counts, _, changes: f(self, counts, None, changes),
      "Target.multiply": fixed((torch.zeros(1), torch.zeros(1)))}),
    ("remainders of another modulus", "dlrm.modulus", ALL,
     {"detects": lambda f: lambda changes, modulus: f(changes, 129 - modulus)}),
    ("a bound without meaning", "dlrm.embedding-detection", "table III, high bits",
     {"PAPERS_BOUND": fixed(1.0)}),
    ("checks of int8 products add half the time", "dlrm.gemm-overhead", ALL,
     {"ratios": ratios(50.0)},
     {"TINY": fixed(gemm_overhead.SHAPES), "variants": fixed({}), "ratios": ratios(1.0)}),
    ("checks of bags add half the time", "dlrm.embedding-overhead", "figure 6",
     {"overheads": fixed([50.0] * 4)}, {"overheads": fixed([5.0] * 4), "native": FBGEMM}),
    ("curves sampled every day", "reft.survival", ALL, {"SPACING_DAYS": fixed(1.0)}),
    ("half the best interval", "reft.intervals", ALL,
     {"every": lambda f: lambda *args: max(1, f(*args) // 2)}),
    ("two slots more", "reft.memory", ALL, {"held_bytes": lambda f: lambda *args: 2 * f(*args)}),
    ("a disk faster than memory", "reft.micro", ALL, {"raw_write_s": fixed(1e-9)}),
    ("a node reads twice its share, in twice the time", "reft.weak-scaling", ALL,
     {"Group.moved_bytes": lambda f: lambda *args: 2 * f(*args),
      "Group.slowest_shard_s": fixed(2.4)},
     {"whole_s": fixed(24.0), "Group.slowest_s": SAVED, "Group.slowest_shard_s": fixed(1.2)}
     | {name: fixed(1.0) for name in ("at_once_s", "raw_write_s", "torch_save_s")}),
)
# fmt: on


# Some of each paper; `make campaign` has all, of which docs/reproduction.md counts the verdicts.
FIRST = {
    *("vabft.tightness-fp32", "vabft.false-positives", "vabft.detection"),
    *("attnchecker.gemm-share", "attnchecker.coverage", "attnchecker.frequencies"),
    "attnchecker.checksum-repair",
    *("sdc.gradients", "sdc.drift", "sdc.bf16"),
    *(
        "dlrm.gemm-detection",
        "dlrm.modulus",
        "dlrm.gemm-overhead",
        "reft.survival",
        "reft.intervals",
    ),
}


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, marks=pytest.mark.study if each[1] in FIRST else pytest.mark.campaign)
        for each in MUTATIONS
    ],
    ids=lambda mutation: f"{mutation[1]}: {mutation[0]}",
)
def test_a_defect_turns_the_verdicts_that_rest_on_it(mutation: Mutation) -> None:
    if mutation[1].startswith("attnchecker."):
        pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
    rows = list(outcome(mutation))
    assert rows
    assert [row for row in rows if not row["turned"]] == []


def test_every_recorded_verdict_that_holds_was_turned_by_a_defect() -> None:
    rows = json.loads((KEPT / "mutations.json").read_text())["rows"]
    turned = {(row["study"], row["source"], row["quantity"]) for row in rows if row["turned"]}
    held = {
        (record.study.name, *key)
        for record in read_records(REGISTRY.values(), KEPT)
        for key, cells in record.groups().items()
        if joined([one for _, one in cells]) in HELD
    }
    assert held - turned == set()


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [row for mutation in MUTATIONS for row in outcome(mutation)]
    verdicts = {(row["study"], row["source"], row["quantity"]): row["turned"] for row in found}
    result = {"date": datetime.now(UTC).date().isoformat(), "verdicts": len(verdicts)}
    result |= {"turned": sum(verdicts.values()), "rows": found}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{result['verdicts']} verdicts, {result['turned']} turned")
