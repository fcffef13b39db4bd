"""The order in which DDP sums gradients, settled before the first step."""

from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import events
from holdfast.events.recorder import DISCARDED
from holdfast.protection import collecting
from holdfast.replay.parameters import reshard
from holdfast.replay.reduction import Reductions
from holdfast.replay.rerun import MicroStep


class Buckets:
    """Runs a pass and discards it, after which DDP's buckets no longer change.

    DDP lays out its buckets anew after the first backward pass, and the sum of three or more ranks
    depends on the layout. Without this the first step would differ when it is repeated, and a
    restarted run would reduce its first step in another order than the run that it continues.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._settled: WeakSet[nn.Module] = WeakSet()

    def settle(self, micro_step: MicroStep) -> None:
        """Run a pass for the wrappers that had none; leave random state and buffers as they are."""
        new = [module for module in self._model.modules() if self._changes(module)]
        if not new:
            return
        self._settled.update(new)
        step = events.current_step()
        events.set_step(DISCARDED)
        reductions = Reductions(self._model)
        with collecting(), reductions.set_to([True] * len(reductions.flags())):
            micro_step.run()
        events.set_step(step)
        micro_step.start.restore(self._model)
        reshard(self._model)
        self._model.zero_grad(set_to_none=True)

    def _changes(self, module: nn.Module) -> bool:
        if not isinstance(module, DistributedDataParallel) or module in self._settled:
            return False
        # The sum of two ranks is the same in any order.
        return module.process_group.size() > 2
