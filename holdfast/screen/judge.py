"""The judge, which decides from their observations which units compute wrong results.

It uses no processes, no clock and no tensors. For each workload and input it counts every unit's
digests. The right digest is that of the stored reference; without one, the digest that most units
give; if units disagree in equal numbers, that of the only side whose units have no other finding.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.screen.difference import Difference, merged
from holdfast.screen.messages import Observation
from holdfast.screen.units import Unit

FINDERS = ("checksum", "repetition", "reference", "comparison", "collective")
_SHOWN_CHECKS = 3
_NAMED = 4  # units that disagree are listed by name up to this number

Key = tuple[str, str, int]  # kind, op, variant
References = Mapping[str, Mapping[str, str]]  # kind → "op#variant" → digest


def entry(op: str, variant: int) -> str:
    """Return the key of a workload on one input in references."""
    return f"{op}#{variant}"


@dataclass(frozen=True)
class Finding:
    """A unit that computed wrong results of a workload.

    ``unit`` is several names with "or" between them if it is not known which one is wrong.
    ``finders`` are the methods of ``FINDERS`` that found it. ``wrong`` is the number of wrong
    executions, 0 if the right result is not known. ``differences`` are those from the right result,
    or from the unit's other results, ``checks`` the first messages of the op's own checks, and
    ``first_s`` the seconds from the start to the first sign of it.
    """

    unit: str
    op: str
    finders: tuple[str, ...]
    wrong: int
    executions: int
    differences: tuple[Difference, ...] = ()
    checks: tuple[str, ...] = ()
    first_s: float = 0.0


@dataclass
class _Seen:
    """One unit's results of one workload on one input."""

    first: str = ""
    digests: Counter[str] = field(default_factory=Counter)
    finders: set[str] = field(default_factory=set)
    checked: int = 0  # executions that the op's own check found wrong
    checks: list[str] = field(default_factory=list)  # the first few different messages
    differences: list[Difference] = field(default_factory=list)
    first_s: float = float("inf")

    @property
    def usual(self) -> str:
        """The most frequent digest, the first one of several."""
        return self.digests.most_common(1)[0][0]


class Judge:
    """Collects observations in any order and derives findings from them at any time.

    Units of the same kind must agree bit for bit. ``references`` are right digests by kind and
    ``entry``, as far as they are known, and only the methods in ``finders`` are used.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        references: References | None = None,
        finders: Collection[str] = FINDERS,
    ) -> None:
        self._kinds = {unit.name: unit.kind for unit in units}
        self._references = references or {}
        self._finders = tuple(finder for finder in FINDERS if finder in finders)
        self._seen: defaultdict[Key, dict[str, _Seen]] = defaultdict(dict)
        self.comparisons: Counter[str] = Counter()

    def observe(self, observation: Observation, elapsed_s: float = 0.0) -> frozenset[str]:
        """Add one observation; return the finders that find something wrong in it."""
        key = (self._kinds[observation.unit], observation.op, observation.variant)
        units = self._seen[key]
        seen = units.setdefault(observation.unit, _Seen())
        found = self._found(key, seen, observation) & set(self._finders)
        seen.first = seen.first or observation.digest
        seen.digests[observation.digest] += observation.count
        seen.differences += observation.differences
        if "comparison" in found:
            self._note_disagreement(units, observation.digest, elapsed_s)
        if found:
            seen.first_s = min(seen.first_s, elapsed_s)
        if "checksum" in found:
            seen.checked += observation.count
            seen.checks += [check for check in observation.checks if check not in seen.checks]
            del seen.checks[_SHOWN_CHECKS:]
        seen.finders |= found - {"comparison"}  # which side is wrong is decided in the end
        return frozenset(found)

    def _note_disagreement(self, units: Mapping[str, _Seen], digest: str, elapsed_s: float) -> None:
        """Note the time for the units on the other side, which may turn out to be wrong."""
        for other in units.values():
            if other.first != digest:
                other.first_s = min(other.first_s, elapsed_s)

    def _found(self, key: Key, seen: _Seen, observation: Observation) -> set[str]:
        """Return the finders that object to an observation, and count their comparisons."""
        digest, count = observation.digest, observation.count
        reference = self._reference(key)
        # A result equal to the unit's first one was compared with other units' when that came.
        news = digest != seen.first
        others = [
            each for unit, each in self._seen[key].items() if news and unit != observation.unit
        ]
        repeats = count if seen.first else count - 1
        compared = {
            "checksum": count,
            "repetition": repeats,
            "reference": count if reference is not None else 0,
            "comparison": len(others) if not seen.first else 0,
            "collective": 0,  # counted where they are made
        }
        self.comparisons.update({name: compared[name] for name in self._finders})
        found = {"checksum"} if observation.checks else set()
        if seen.first and digest != seen.first:
            found.add("repetition")
        if reference is not None and digest != reference:
            found.add("reference")
        if any(digest != other.first for other in others):
            found.add("comparison")
        return found

    def findings(self) -> list[Finding]:
        """Return the findings of every unit and workload, by unit and time of the first sign."""
        parts: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
        for key, units in self._seen.items():
            for finding in self._findings_of(key, units):
                parts[finding.unit, finding.op].append(finding)
        found = [_merged(each) for each in parts.values()]
        return sorted(found, key=lambda finding: (finding.unit, finding.first_s, finding.op))

    def _findings_of(self, key: Key, units: Mapping[str, _Seen]) -> Iterable[Finding]:
        """Return the findings of one workload on one input."""
        right = self._right(key, units)
        if self._all_alike_but_wrong(units, right):
            yield self._shared(key, units)
            return
        if right is None and self._compares(units):
            yield self._undecided(key, units)
        for name, seen in units.items():
            finders = set(seen.finders)
            if right is not None and self._compares(units) and _deviates(seen, units, right):
                finders.add("comparison")
            known = right if right is not None or self._compares(units) else seen.usual
            if finders:
                yield _finding(name, key[1], seen, known, _ordered(finders))

    def _compares(self, units: Mapping[str, _Seen]) -> bool:
        return "comparison" in self._finders and len(units) > 1

    def _all_alike_but_wrong(self, units: Mapping[str, _Seen], right: str | None) -> bool:
        usual = {seen.usual for seen in units.values()}
        return len(units) > 1 and len(usual) == 1 and right is not None and right not in usual

    def _shared(self, key: Key, units: Mapping[str, _Seen]) -> Finding:
        """Return the finding that all units agree on another result than the reference."""
        first_s = min(seen.first_s for seen in units.values())
        many = sum(seen.digests.total() for seen in units.values())
        return Finding(
            f"all {len(units)} units", key[1], ("reference",), many, many, first_s=first_s
        )

    def _undecided(self, key: Key, units: Mapping[str, _Seen]) -> Finding:
        """Return the finding that units disagree and nothing says which of them is wrong."""
        named = [name for name in self._kinds if name in units]
        names = " or ".join(named) if len(named) <= _NAMED else f"some of {len(named)} units"
        executions = max(seen.digests.total() for seen in units.values())
        first_s = min(seen.first_s for seen in units.values())
        found = merged(each for seen in units.values() for each in seen.differences)
        return Finding(names, key[1], ("comparison",), 0, executions, found, first_s=first_s)

    def _reference(self, key: Key) -> str | None:
        kind, op, variant = key
        return self._references.get(kind, {}).get(entry(op, variant))

    def _right(self, key: Key, units: Mapping[str, _Seen]) -> str | None:
        """Return the right digest; None if it is not known."""
        reference = self._reference(key)
        if reference is not None and "reference" in self._finders:
            return reference
        if len(units) == 1:
            return next(iter(units.values())).usual
        if not self._compares(units):
            return None
        return self._by_majority(units)

    def _by_majority(self, units: Mapping[str, _Seen]) -> str | None:
        votes = Counter(seen.usual for seen in units.values())
        (digest, most), *rest = votes.most_common()
        if not rest or most > rest[0][1]:
            return digest
        clean = {seen.usual for name, seen in units.items() if not self._is_suspect(name)}
        return clean.pop() if len(clean) == 1 else None

    def _is_suspect(self, unit: str) -> bool:
        """Return whether any method found something in this unit without comparing units."""
        return any(units[unit].finders for units in self._seen.values() if unit in units)

    def missing_differences(self) -> list[tuple[str, str, int, str]]:
        """List wrong units whose results have to be compared with a right unit's, bit by bit.

        Each is a tuple of the wrong unit, the workload, the number of its input, and the right
        unit.
        """
        wanted = []
        for key, units in self._seen.items():
            right = self._right(key, units)
            good = [name for name, seen in units.items() if seen.first == right]
            for name, seen in units.items():
                if seen.first != right and not seen.differences and good:
                    wanted.append((name, key[1], key[2], good[0]))
            if right is None and self._compares(units):
                pair = self._two_sides(units)
                if pair and not any(units[name].differences for name in pair):
                    wanted.append((pair[1], key[1], key[2], pair[0]))
        return wanted

    def _two_sides(self, units: Mapping[str, _Seen]) -> tuple[str, str] | None:
        first, *others = units
        odd = [name for name in others if units[name].first != units[first].first]
        return (first, odd[0]) if odd else None

    def explain(self, unit: str, op: str, variant: int, found: Iterable[Difference]) -> None:
        """Add the differences that a comparison of two units' results gave."""
        self._seen[self._kinds[unit], op, variant][unit].differences += found

    def agreed(self, kind: str) -> dict[str, str]:
        """Return, by ``entry``, the digests that every unit of a kind gave every time."""
        agreed = {}
        for (of_kind, op, variant), units in self._seen.items():
            digests = set().union(*(seen.digests for seen in units.values()))
            if of_kind == kind and len(digests) == 1:
                agreed[entry(op, variant)] = digests.pop()
        return agreed

    def repeated(self, unit: str) -> bool:
        """Return whether a unit computed every workload at least twice."""
        kind = self._kinds[unit]
        mine = [units.get(unit) for key, units in self._seen.items() if key[0] == kind]
        return bool(mine) and all(seen and seen.digests.total() > 1 for seen in mine)


def _deviates(seen: _Seen, units: Mapping[str, _Seen], right: str) -> bool:
    """Return whether a unit gave a result other than the right one of another unit."""
    held = any(other is not seen and right in other.digests for other in units.values())
    return held and set(seen.digests) != {right}


def _ordered(finders: Collection[str]) -> tuple[str, ...]:
    return tuple(finder for finder in FINDERS if finder in finders)


def _finding(
    name: str, op: str, seen: _Seen, right: str | None, finders: tuple[str, ...]
) -> Finding:
    executions = seen.digests.total()
    wrong = executions - seen.digests[right] if right is not None else 0
    return Finding(
        unit=name,
        op=op,
        finders=finders,
        wrong=max(wrong, seen.checked),
        executions=executions,
        differences=merged(seen.differences),
        checks=tuple(seen.checks),
        first_s=seen.first_s if seen.first_s < float("inf") else 0.0,
    )


def _merged(parts: list[Finding]) -> Finding:
    """Merge the findings of all inputs of a workload into one."""
    return replace(
        parts[0],
        finders=_ordered({finder for part in parts for finder in part.finders}),
        wrong=sum(part.wrong for part in parts),
        executions=sum(part.executions for part in parts),
        differences=merged(each for part in parts for each in part.differences),
        checks=tuple(dict.fromkeys(each for part in parts for each in part.checks))[:_SHOWN_CHECKS],
        first_s=min(part.first_s for part in parts),
    )
