"""Even choice of the executions that are checked if only a share of them is."""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch


def due(count: int, frequency: float) -> bool:
    """Return whether execution ``count`` (0 is the first) is one of those to check.

    Execution c is due iff ⌈(c+1)·f⌉ > ⌈c·f⌉, in exact arithmetic on the value that the float
    ``frequency`` stands for.

    Guarantees: of the first n executions exactly ⌈n·f⌉ are due, including the first one if f > 0,
    and of any n successive ones ⌊n·f⌋ or ⌈n·f⌉. Ranks with equal counts decide alike, as the answer
    depends on the arguments alone.

    Not covered: faults that recur with the period of the checks. At f = 1/k every k-th execution
    is checked, so that the others of a cycle of k never are.

    Args:
        count: Number of earlier executions of the same protected section.
        frequency: Share to check, from 0 (never) to 1 (always).

    Raises:
        ValueError: The frequency is not from 0 to 1, or the count is negative.
    """
    if not 0.0 <= frequency <= 1.0:
        raise ValueError(f"frequency = {frequency!r} must be between 0 (never) and 1 (always)")
    if count < 0:
        raise ValueError(f"count = {count} must be at least 0: it numbers the executions")
    share, whole = frequency.as_integer_ratio()
    return -(-(count + 1) * share // whole) > -(-count * share // whole)


RECORDED = 256  # executions of a thread whose numbers are kept for their recomputation
_NO_SEQUENCE = 2**63  # nodes that accumulate gradients have a higher number: their place is unknown


@dataclass
class _Execution:
    """One execution: its number, where it began in autograd's order, and whether it made nodes."""

    number: int
    began: int
    makes_nodes: bool

    def precedes(self, node: int) -> bool:
        """Return whether the region that autograd node ``node`` belongs to may contain it."""
        # Reentrant checkpointing makes its node first, and none for what runs within it.
        return self.began <= (node if self.makes_nodes else node + 1)


@dataclass
class _Thread:
    """The latest executions of one thread, and the node for which it recomputes some of them."""

    executions: deque[_Execution] = field(default_factory=lambda: deque(maxlen=RECORDED))
    node: int = -1
    repeated: int = 0


class Executions:
    """Numbers the executions of a section of forward; a recomputation has the original's number.

    Activation checkpointing computes a part of forward again, within backward and on behalf of an
    autograd node. The original is the latest execution that began no later than that node was made.
    Several executions within one reentrant checkpoint are recomputed in their order; within a
    non-reentrant one, they all get the number of the last.
    """

    def __init__(self) -> None:
        self._count = 0
        self._threads: dict[int, _Thread] = {}

    def number(self) -> int:
        """Return the number of the execution that begins now on this thread."""
        if torch.compiler.is_compiling():  # Dynamo cannot trace what this reads
            return int(torch.compiler.disable(self._next)())
        return self._next()

    def _next(self) -> int:
        found = self.recomputed()
        if found is not None:
            return found
        found, self._count = self._count, self._count + 1
        self._record(found)
        return found

    def recomputed(self) -> int | None:
        """Return the number of the original if this is a recomputation of a known execution."""
        node = recomputing_for()
        if node is None:
            return None
        thread = self._thread()
        known = [each for each in thread.executions if each.precedes(node)]
        if not known:  # backward may run on another thread than forward did
            everywhere = [e for other in list(self._threads.values()) for e in other.executions]
            known = [each for each in everywhere if each.precedes(node)]
        if not known:
            return None
        latest = max(each.began for each in known)
        alike = [each for each in known if each.began == latest]
        thread.repeated = thread.repeated + 1 if thread.node == node else 0
        thread.node = node
        found = alike[thread.repeated % len(alike)].number
        self._record(found)  # a nested checkpoint recomputes the recomputation
        return found

    def _record(self, number: int) -> None:
        began: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        execution = _Execution(number, began, torch.is_grad_enabled())
        self._thread().executions.append(execution)

    def _thread(self) -> _Thread:
        return self._threads.setdefault(threading.get_ident(), _Thread())


def recomputing_for() -> int | None:
    """Return the sequence number of the autograd node that this thread evaluates; None for none."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    sequence = -1 if node is None else int(node._sequence_nr())
    return sequence if 0 <= sequence < _NO_SEQUENCE else None
