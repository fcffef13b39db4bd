"""Every product of real layers, training loops and transforms: forward, dX, dW, clean, struck.

Each program is run bare, protected, with each of its products struck in turn, and struck while
unverified: the same bits in silence; found, named and repaired bit for bit; harmful if not.
"""

import pytest
from gemm_strikes import Check, Program, triples
from programs_layers import LAYERS
from programs_training import TRAINING
from programs_transforms import TRANSFORMS
from programs_updates import UPDATES

PROGRAMS = LAYERS | TRAINING | UPDATES | TRANSFORMS


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("check", "program"), triples(PROGRAMS))
def test_every_product(check: Check, program: Program) -> None:
    check(program)
