"""Loops by seeds by faults: every run of them, and the outcome of each."""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast_lab.zoo.ranks.jobs import JobFailed, Lines, run
from holdfast_lab.zoo.ranks.loops import LOOPS
from holdfast_lab.zoo.ranks.rank import Scenario
from holdfast_lab.zoo.ranks.strikes import KINDS, Strike

# Events that show that a fault was found and what was done, by kind of fault. Of a killed run the
# restart says that it restored.
FOUND_BY = {
    "forward": "gemm_fault",
    "backward": "gemm_fault",
    "outside": "rerun",
    "audited": "rerun",
    "rest": "state_fault",
    "kill": "restored",
}


@dataclass(frozen=True)
class Outcome:
    """How a run under a Guard ended.

    Attributes:
        loop, seed, kind: Which loop, and what happened to it.
        outcome: ``equal`` if all ranks ended with the bits of the calm bare run although the same
            fault changes those of the bare loop; ``differs`` if they did not; ``harmless`` if the
            fault changes nothing; ``unseen`` if nobody noticed it; ``alarm`` if a calm run was
            suspected; ``refused`` if the Guard refused the loop on all ranks before the first step;
            ``failed`` if a rank failed.
        detail: What a failed run printed.
    """

    loop: str
    seed: int
    kind: str
    outcome: str
    detail: str = ""


def outcomes(loop: str, seed: int, kinds: Sequence[str] = KINDS) -> list[Outcome]:
    """Run a loop bare, calm under a Guard, and struck by each kind of fault."""
    kinds = () if LOOPS[loop].refused else kinds
    strikes = [Strike.drawn(kind, LOOPS[loop], seed) for kind in kinds]
    scenarios = list(_scenarios(strikes))
    with tempfile.TemporaryDirectory() as folder:
        try:
            lines = run(loop, seed, scenarios, Path(folder))
        except JobFailed as failure:
            return [Outcome(loop, seed, "", "failed", str(failure))]
    return [Outcome(loop, seed, kind, judged(kind, lines)) for kind in ("calm", *kinds)]


def _scenarios(strikes: Sequence[Strike]) -> Iterator[Scenario]:
    """Yield the runs; the one that is killed last, as its ranks have to be started again."""
    yield Scenario("bare", None, guarded=False)
    yield Scenario("calm", None, guarded=True)
    for strike in strikes:
        if strike.kind != "kill":
            yield Scenario(f"bare-{strike.kind}", strike, guarded=False)
    for strike in sorted(strikes, key=lambda strike: strike.kind == "kill"):
        yield Scenario(strike.kind, strike, guarded=True)


def judged(kind: str, lines: Lines) -> str:
    """Return the outcome of a run from what its ranks said."""
    right = _digests("bare", lines)
    if all(line["refused"] for line in lines[kind]):
        return "refused"
    if kind not in ("calm", "kill") and _digests(f"bare-{kind}", lines) == right:
        return "harmless"
    if _digests(kind, lines) != right:
        return "differs"
    seen = {event for line in lines[kind] for event in line["events"]}
    if kind == "calm":
        return "alarm" if seen else "equal"
    if kind == "kill" and not all(line["first"] for line in lines[kind]):
        return "unseen"
    return "equal" if FOUND_BY[kind] in seen else "unseen"


def _digests(name: str, lines: Lines) -> list[str]:
    return [line["digest"] for line in lines.get(name, [])]


def main(arguments: Sequence[str]) -> int:
    """Run loops and seeds; return 0 if every run ended equal."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_lab.zoo.ranks", description=__doc__)
    parser.add_argument("--loops", default=",".join(LOOPS), help="names with commas between them")
    parser.add_argument("--seeds", type=seeds_of, default="1", help="one seed, or first-last")
    parser.add_argument("--json", type=Path, help="file for all outcomes")
    given = parser.parse_args(arguments)
    loops = given.loops.split(",")
    if unknown := [name for name in loops if name not in LOOPS]:
        parser.error(f"no loops {unknown}; there are: {', '.join(LOOPS)}")
    found: list[Outcome] = []
    for loop in loops:
        for seed in given.seeds:
            found += outcomes(loop, seed)
            _print(found, loop, seed)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return int(any(one.outcome not in ("equal", "refused") for one in found))


def seeds_of(text: str) -> range:
    """Return the seeds that ``3`` or ``1-3`` stands for."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _print(found: Sequence[Outcome], loop: str, seed: int) -> None:
    mine = [one for one in found if (one.loop, one.seed) == (loop, seed)]
    print(f"{loop} {seed}: {dict(Counter(one.outcome for one in mine))}", flush=True)
    for one in mine:
        if one.outcome not in ("equal", "refused"):
            print(f"  {one.kind}: {one.outcome} {one.detail}", flush=True)
