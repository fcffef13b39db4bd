"""Every product of real layers, training loops and transforms: forward, dX, dW, clean, struck.

Each program is run bare, protected, with each of its products struck in turn, and struck while
unverified: the same bits in silence; found, named and repaired bit for bit; harmful if not.
"""

import pytest
from case_loops import for_each, fuzz_after
from gemm_strikes import CHECKS
from programs_layers import LAYERS
from programs_parameters import PARAMETERS
from programs_shapes import BATCHES, SHAPES
from programs_training import TRAINING, UPDATES
from programs_transforms import TRANSFORMS

PROGRAMS = {
    "layers": LAYERS,
    "training": TRAINING,
    "updates": UPDATES,
    "transforms": TRANSFORMS,
    "parameters": PARAMETERS,
    "shapes": SHAPES,
    "batches": BATCHES,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", fuzz_after(PROGRAMS, len(PROGRAMS) - 1))
def test_every_product(kind: str, check: str) -> None:
    @for_each("name", PROGRAMS[kind])
    def holds(name: str) -> None:
        CHECKS[check](PROGRAMS[kind][name])

    holds()
