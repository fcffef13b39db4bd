"""Loops over the cases of one test, where an item for each case would cost more than the case."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from holdfast import events, sites

LONGEST_REPR = 200

Test = Callable[..., None]
Case = dict[str, Any]


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any], *, first: int | None = None
) -> Callable[[Test], Test]:
    """Call a test with every value, in one item; a failure names its case.

    Takes what ``pytest.mark.parametrize`` takes. Each case begins with an empty event log and
    without an armed fault site. Fixtures are set up once for all cases. With ``first`` so many
    cases belong to every run, and the others are an item of their own with the marker ``fuzz``.
    """
    parameters = names.replace(" ", "").split(",") if isinstance(names, str) else names
    cases = [
        dict(zip(parameters, value if len(parameters) > 1 else (value,), strict=True))
        for value in values
    ]
    part = f"{parameters[0]}_cases"
    parts = {"first": cases[:first], "rest": cases[first:]}

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            chosen = cases if first is None else parts[given.pop(part)]
            for case in chosen:
                _call(test, given, case)

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in parameters]
        if first is not None:
            kept.append(inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        if first is None:
            return run
        return pytest.mark.parametrize(part, fuzz_after(parts))(run)

    return decorate


def _call(test: Test, given: Case, case: Case) -> None:
    events.clear()
    sites.disarm()
    try:
        test(**given, **case)
    except BaseException as error:
        shown = (f"{name}={value!r}"[:LONGEST_REPR] for name, value in case.items())
        error.add_note(f"in the case {', '.join(shown)}")
        raise


def fuzz_after(values: Iterable[Any], count: int = 1, most: int | None = None) -> list[Any]:
    """Values for ``parametrize``: the first ``count`` for every run, the others for ``fuzz``.

    Those beyond ``most`` are for ``campaign``.
    """
    found: list[Any] = []
    for position, value in enumerate(values):
        mark = pytest.mark.fuzz if most is None or position < most else pytest.mark.campaign
        found.append(value if position < count else pytest.param(value, marks=mark))
    return found
