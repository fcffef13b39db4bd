"""Loss spikes of nodes 4, 6 and 7, of which figure 7 has the curves but the paper no cause.

The errors that tables 8 and 9 print of these nodes are too small for a spike. Where the paper
reports one, four steps are therefore struck with large errors: their time, number and size are
inputs. Errors of up to ``FINITE`` times a value leave all gradients finite, so that clipping bounds
the update. Those of ``OVERFLOWS`` make the norm NaN, and clipping, which multiplies by it, makes
every weight NaN. Only this ruins a model here; the paper does not say how its model was ruined.
"""

from typing import NamedTuple

from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import BURST_STEPS, STEADY, NodeProfile
from holdfast_lab.study.sdc.paper_tasks import COSMOS, Task, ruined
from holdfast_lab.trainer.gpt import GPT

FINITE, OVERFLOWS = 1e6, 1e15
SHARE = 0.02  # of the values of each submodule, while the loss spikes
MIDDLE, END = 0.5, 0.9  # of the steps


class Spike(NamedTuple):
    """The first step of a loss spike, and the largest relative error in its steps."""

    first: int
    size: float


class SpikingDevice(UnhealthyDevice):
    """A node during one loss spike; in other steps it computes as a healthy one."""

    def __init__(self, model: GPT, node: int, seed: int, spike: Spike) -> None:
        super().__init__(model, node=node, seed=seed, bound_rms=None, rhythm=STEADY)
        self._spike = spike
        self._severities = dict.fromkeys(self._severities, spike.size)

    def rate(self, step: int, layer: int, direction: str, part: str) -> float:
        """Return the share of wrong values in a step, which is the same for all submodules."""
        return SHARE if 0 <= step - self._spike.first < BURST_STEPS else 0.0


def reported(profile: NodeProfile, task: Task, steps: int) -> list[Spike]:
    """List the spikes that the paper reports of a node, and what may have ruined its model."""
    spikes = [Spike(int(MIDDLE * steps), FINITE)] * (profile.loss_spikes and task == COSMOS)
    return spikes + [Spike(int(END * steps), OVERFLOWS)] * ruined(profile, task)
