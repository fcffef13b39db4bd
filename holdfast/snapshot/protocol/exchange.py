"""Decisions that need several exchanges with other processes, as generators without I/O.

Such a generator yields one request after the other and is sent the answers. ``carry_out`` drives it
with a real process group and a real SMP; the simulator of the laboratory drives the same code.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar


@dataclass(frozen=True)
class Gather:
    """Exchange ``value`` between all ranks; the answer is the list of theirs, in rank order."""

    value: object


@dataclass(frozen=True)
class Call:
    """Call ``method`` of this rank's ``SmpSession``; the answer is its result."""

    method: str
    arguments: tuple[object, ...] = ()


Result = TypeVar("Result")
Exchange = Generator[Gather | Call, Any, Result]


def carry_out(
    exchange: Exchange[Result], session: object, gather: Callable[[Any], list[Any]]
) -> Result:
    """Answer the requests of an exchange until it ends, and return its result.

    An exception that a request raises is raised in the exchange, where it was yielded.
    """
    advance: Callable[[], Gather | Call] = partial(next, exchange)
    while True:
        try:
            request = advance()
        except StopIteration as done:
            result: Result = done.value
            return result
        try:
            if isinstance(request, Gather):
                answer: Any = gather(request.value)
            else:
                answer = getattr(session, request.method)(*request.arguments)
        except Exception as error:
            advance = partial(exchange.throw, error)
        else:
            advance = partial(exchange.send, answer)
