"""``dlrm.modulus``: what checksums modulo other numbers than 127 would detect (section IV-C).

The paper takes 127 as the largest odd number whose remainders are int8. Here every modulus from 2
to 128 is tried by counting: all flips and all other values of an element of B times all
activations, all flips of an element of C, and all differences to another 32-bit value. One row of
A checks the element, as in the paper's bounds.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from holdfast_lab.study.published import Published, at_least, exactly
from holdfast_lab.study.registry import Progress, Row, Settings, Study

MODULI = range(2, 129)
SHOWN = (3, 31, 61, 64, 85, 113, 126, 127, 128)
PAPERS = 127
FLIPS_B, VALUES_B = "one flipped bit of B, %", "any other value of B, %"
FLIPS_C, VALUES_C = "one flipped bit of C, %", "any other value of C, %"
ODD, BEST = "flips of C, the worst odd modulus, %", "best modulus"
FOR_PAPERS = {
    FLIPS_B: Published(98.83, "section IV-C, bounds of 127", at_least("98.83")),
    VALUES_B: Published(96.89, "section IV-C, bounds of 127", at_least("96.89")),
    FLIPS_C: Published(100.0, "section IV-C, bounds of 127", exactly(100.0, "any odd modulus")),
    VALUES_C: Published(99.21, "section IV-C, bounds of 127", at_least("99.21")),
}
CHOICE = {
    ODD: Published(
        100.0, "section IV-C, choice of the modulus", exactly(100.0, "any odd modulus detects all")
    ),
    BEST: Published(
        127.0,
        "section IV-C, choice of the modulus",
        exactly(127.0, "the largest odd number that is int8"),
    ),
}


def detects(changes: NDArray[np.int64], modulus: int) -> NDArray[np.bool_]:
    """Return which changes of a row's sum change its remainder."""
    return np.not_equal(changes % modulus, 0)


def shares(modulus: int) -> dict[str, float]:
    """Return the percentage of each kind of fault that a modulus detects."""
    activations = np.arange(256)
    flips = 2 ** np.arange(32)
    of_b = {FLIPS_B: flips[:8], VALUES_B: np.arange(1, 256)}
    found = {
        name: 100 * float(detects(np.outer(changes, activations), modulus).mean())
        for name, changes in of_b.items()
    }
    found[FLIPS_C] = 100 * float(detects(flips, modulus).mean())
    # Differences run through the remainders in turn, so that one period stands for all of 2³² − 1.
    found[VALUES_C] = 100 * float(detects(np.arange(modulus), modulus).mean())
    return found


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    found = {modulus: shares(modulus) for modulus in MODULI}
    for modulus in SHOWN:
        published = FOR_PAPERS if modulus == PAPERS else {}
        yield Row("detected, one row of A", {"modulus": modulus}, found[modulus], published)
    odd = min(each[FLIPS_C] for modulus, each in found.items() if modulus % 2)
    # Faults of both kinds and places count alike.
    best = max(found, key=lambda modulus: sum(found[modulus].values()))
    yield Row("choice", {"from": MODULI[0], "to": MODULI[-1]}, {ODD: odd, BEST: best}, CHOICE)


STUDY = Study(
    name="dlrm.modulus",
    paper="DLRM-ABFT, section IV-C",
    reproduces="127 is the best modulus of checksums that are int8",
    run=_run,
)
