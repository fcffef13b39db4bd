"""Fault schedules: the faults of a run with their steps and ranks, as TOML and as objects.

A schedule is a list of ``[[fault]]`` tables. A fault's identifier is its position, from 0::

    [[fault]]
    step = 12
    rank = 0
    kind = "bitflip"
    op = "blocks.0.attn/bmm#2/grad_a"
    bit = 30
"""

import difflib
import json
import reprlib
import sys
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.site_names import BACKWARD_TILES, FORWARD_TILES
from holdfast.text_files import UNPARSABLE, read_text

KILLS = ("kill_trainer", "lose_node")
# The kinds of faults that a schedule may name.
KINDS = ("bitflip", "inf", "nan", "near_inf", "value", *KILLS)
TILE_SITES = {
    "scores": "fused attention: a tile of Q Kᵀ",
    "probabilities": "fused attention: a tile of P in memory, before its products",
    "accumulator": "fused attention, forward: the output of a tile of queries, so far",
    "state": "fused attention, forward: running maxima and sums",
    "grad_probabilities": "fused attention, backward: a tile of dP",
    "grad_query": "fused attention, backward: the gradient of a tile of queries, so far",
    "grad_key": "fused attention, backward: the gradient of a tile of keys, transposed, so far",
    "grad_value": "fused attention, backward: the gradient of a tile of values, likewise",
    "grad_scores": "fused attention, backward: a tile of dS in memory, before its products",
    "exponentials": "fused attention, forward: P as though it had been computed so",
    "grad_softmax": "fused attention, backward: dS as though it had been computed so",
}
# The sites at which a fault can strike, each with what is struck.
SITES = {
    "output": "the product, after the GEMM and before its verification",
    "operand": "operand B in memory, after its checksum was encoded",
    "checksum": "the checksum of operand B itself",
    "module": "the output of a module",
    "rest": "a tensor of the training state, after the snapshot has copied it and before its use",
    "update": "a tensor of the training state, as the optimizer's step has left it",
    "collective": "what this rank gets from a collective of the pass",
    **TILE_SITES,
}
OF_STATE, OUTSIDE_MODELS = ("rest", "update"), ("rest", "update", "collective")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
FORWARD_END, BACKWARD_END = "sdpa/forward", "sdpa_backward/grad_qkv"
WIDEST_BITS = 64

_TYPES: dict[str, tuple[Any, str]] = {
    "step": (int, "an integer"),
    "rank": (int, "an integer"),
    "kind": (str, "a string"),
    "site": (str, "a string"),
    "op": (str, "a string"),
    "bit": (int, "an integer"),
    "index": (list, "a list of integers such as [3, 17]"),
    "value": (int | float, "a number"),
    "host": (int, "an integer"),
}
NO_RANK = -1
_CHOICES_LENGTH = 400
_SHOWN_LENGTH = 120


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    Args:
        step: Training step in which it is injected, from 0.
        rank: Rank on which it is injected; ``NO_RANK`` for ``lose_node``, which names a host.
        kind: One of ``KINDS``.
        site: One of ``SITES``.
        op: Name of a matmul, or path of a module if ``site`` is ``"module"``, or path of a tensor
            in a snapshot if it is ``"rest"`` or ``"update"`` (``model.fc.weight``,
            ``optimizer.state.0.exp_avg``), or one of ``COLLECTIVES``, the first of the pass.
            A ``kill_trainer`` without it happens at the start of the step. In fused attention
            (``…/sdpa/forward``, ``…/sdpa_backward/grad_qkv``) the site is one of ``TILE_SITES``;
            the fault is injected into the first tile of that kind, whose [row, column] is
            ``index``.
        bit: Bit to flip, 0 the least significant; for ``bitflip`` only. The injector checks that
            the element's dtype has it.
        index: Index of the element in the matrix or tensor; None lets the injector draw it.
        value: New value of the element; for ``value`` only.
        host: Index of the host that is lost with all its processes; for ``lose_node`` only. The
            launcher ends it while ``step`` is running, or some steps later if steps are short.
        identifier: Position in the schedule, from 0.

    Raises:
        ValueError: The fields contradict each other or are out of range.
    """

    step: int
    rank: int
    kind: str
    site: str = "output"
    op: str = ""
    bit: int | None = None
    index: tuple[int, ...] | None = None
    value: float | None = None
    identifier: int = 0
    host: int | None = None

    def __post_init__(self) -> None:
        for holds, message in (*_place_checks(self), *_effect_checks(self)):
            if not holds:
                raise ValueError(message)


def _place_checks(fault: Fault) -> Iterable[tuple[bool, str]]:
    lost, kill = fault.kind == "lose_node", fault.kind in KILLS
    yield fault.kind in KINDS, f"unknown kind {_shown(fault.kind)}; valid: {', '.join(KINDS)}"
    yield fault.site in SITES, f"unknown site {_shown(fault.site)}; valid: {', '.join(SITES)}"
    yield fault.step >= 0, f"step = {fault.step} is negative; steps count from 0"
    yield from _host_checks(fault) if lost else _rank_checks(fault)
    yield kill or fault.op != "", f"op is missing; name the {_target(fault.site)} to strike"
    yield (
        not kill or fault.site not in OUTSIDE_MODELS,
        f"site {fault.site!r} is meaningless for kind {fault.kind!r}; remove it",
    )
    if fault.op:
        yield _tile_check(fault)
    index = fault.index or ()
    yield min(index, default=0) >= 0, f"index = {_shown(list(index))} has a negative entry"


def _rank_checks(fault: Fault) -> Iterable[tuple[bool, str]]:
    yield fault.rank >= 0, f"rank = {fault.rank} is negative; ranks count from 0"
    yield fault.host is None, f"host = {fault.host} is only for kind 'lose_node'; name a rank"


def _host_checks(fault: Fault) -> Iterable[tuple[bool, str]]:
    yield fault.host is not None, "kind 'lose_node' needs host, the index of the host to lose"
    yield (fault.host or 0) >= 0, f"host = {fault.host} is negative; hosts count from 0"
    yield fault.rank == NO_RANK, f"rank = {fault.rank} is meaningless for kind 'lose_node'"
    yield fault.op == "", f"op = {_shown(fault.op)} is meaningless for kind 'lose_node'"
    yield fault.site == "output", f"site = {_shown(fault.site)} is meaningless for kind 'lose_node'"


def _tile_check(fault: Fault) -> tuple[bool, str]:
    """Check that a tile site names fused attention of the right pass, and no other site does."""
    stages = tiles_of(fault.op)
    if fault.site in TILE_SITES:
        tiles = {"forward": FORWARD_TILES, "backward": BACKWARD_TILES}
        passes = " and ".join(name for name, sites in tiles.items() if fault.site in sites)
        return (
            fault.site in stages,
            f"site {fault.site!r} is a tile of fused attention's {passes} pass, which "
            f"{_shown(fault.op)} is not; such ops end in {FORWARD_END} or {BACKWARD_END}",
        )
    return (
        fault.site in ("module", *OUTSIDE_MODELS) or not stages,
        f"op {_shown(fault.op)} is fused attention, which has no site {fault.site!r}; "
        f"valid: {', '.join(stages)}",
    )


def tiles_of(op: str) -> tuple[str, ...]:
    """Return the tile sites of a fused attention op; none if the op is something else."""
    kernel, _, role = "/".join(op.split("/")[-2:]).partition("/")
    ends = {FORWARD_END: FORWARD_TILES, BACKWARD_END: BACKWARD_TILES}
    return ends.get(f"{kernel.partition('#')[0]}/{role}", ())


def _effect_checks(fault: Fault) -> Iterable[tuple[bool, str]]:
    kind, bit, value = fault.kind, fault.bit, fault.value
    bits = f"0 to {WIDEST_BITS - 1}"
    yield kind != "bitflip" or bit is not None, f"kind 'bitflip' needs bit; valid: {bits}"
    yield bit is None or kind == "bitflip", f"bit = {bit} is only for kind 'bitflip', not {kind!r}"
    yield bit is None or 0 <= bit < WIDEST_BITS, f"bit = {bit} is out of range; valid: {bits}"
    yield kind != "value" or value is not None, "kind 'value' needs value, a number"
    yield (
        value is None or kind == "value",
        f"value = {value} is only for kind 'value', not {kind!r}",
    )
    yield value is None or not isnan(value), "value = nan cannot be compared; use kind = 'nan'"
    yield (
        fault.index is None or kind not in KILLS,
        f"index = {_shown(fault.index)} is meaningless for kind {kind!r}; remove it",
    )


def load_schedule(path: Path) -> list[Fault]:
    """Read a schedule from a TOML file; a file without faults is an empty schedule.

    Raises:
        ConfigError: The file cannot be read, or a fault is not valid; the message names both.
    """
    try:
        return parse_schedule(read_text(path), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the fault schedule {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a fault schedule: {error}; save it as UTF-8") from error


def parse_schedule(text: str, origin: str) -> list[Fault]:
    r"""Read a schedule from TOML text; ``origin`` names the text in error messages.

    Raises:
        ConfigError: The text is not TOML, or a fault is not valid; the message names both.

    Example:
        >>> text = '[[fault]]\nstep = 3\nrank = 0\nkind = "nan"\nop = "0/addmm/forward"'
        >>> [fault.step for fault in parse_schedule(text, "an example")]
        [3]
    """
    try:
        tables = _fault_tables(tomllib.loads(text))
    except UNPARSABLE as error:
        raise ConfigError(f"{origin}: {error}") from error
    faults = []
    for identifier, table in enumerate(tables):
        try:
            faults.append(_read_fault(table, identifier))
        except ValueError as error:
            raise ConfigError(f"{origin}: fault {identifier + 1}: {error}") from error
    _check_kills(faults, origin)
    return faults


def _fault_tables(document: dict[str, Any]) -> list[dict[str, object]]:
    for key in document:
        if key != "fault":
            raise ValueError(f"unknown key {_shown(key)}; a schedule holds [[fault]] tables only")
    tables = document.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"fault = {_shown(tables)} is not a list of tables; write [[fault]]")
    return tables


def _read_fault(table: dict[str, object], identifier: int) -> Fault:
    for key in table:
        if key not in _TYPES:
            raise ValueError(f"unknown key {_shown(key)}; valid: {', '.join(_TYPES)}")
    needed = ("step", "kind") if table.get("kind") == "lose_node" else ("step", "rank", "kind")
    for key in needed:
        if key not in table:
            raise ValueError(f"{key} is missing; every fault needs step, rank and kind")
    values = {key: _read_value(key, value) for key, value in table.items()}
    return Fault(**{"rank": NO_RANK} | values, identifier=identifier)


def _read_value(key: str, value: Any) -> Any:
    """Check that the value of a key has the type of the Fault's field, and convert it."""
    kind, wanted = _TYPES[key]
    # In Python, TOML's true and false are integers too.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} = {_shown(value)} is not {wanted}")
    if key == "index":
        if not all(type(entry) is int for entry in value):
            raise ValueError(f"{key} = {_shown(value)} is not {wanted}")
        return tuple(value)
    if key == "value" and abs(value) > sys.float_info.max and value not in (inf, -inf):
        raise ValueError(f"{key} = {_shown(value)} is beyond the range of a double")
    return float(value) if key == "value" else value


def _check_kills(faults: Iterable[Fault], origin: str) -> None:
    seen: dict[tuple[int, str], int] = {}
    for fault in faults:
        if fault.kind not in KILLS:
            continue
        whom = f"kills rank {fault.rank}" if fault.host is None else f"loses host {fault.host}"
        first = seen.setdefault((fault.step, whom), fault.identifier)
        if first != fault.identifier:
            raise ConfigError(
                f"{origin}: fault {fault.identifier + 1}: {whom} at step {fault.step} again, as "
                f"fault {first + 1} does; remove one"
            )


def check_schedule(
    faults: Iterable[Fault],
    *,
    ops: Collection[str],
    modules: Collection[str],
    state: Collection[str] = (),
    steps: int,
    ranks: int,
    nodes: int = 1,
) -> None:
    """Check that every fault of a schedule can be injected into a given run.

    Args:
        faults: The schedule.
        ops: Names of the matmuls that the model executes.
        modules: Paths of the model's modules.
        state: Paths of the tensors of model and optimizer in a snapshot.
        steps: Number of steps of the run.
        ranks: Number of ranks of the run.
        nodes: Number of hosts of the run.

    Raises:
        ConfigError: A fault names a step, rank, host, matmul, module or tensor that the run lacks;
            the message lists the valid ones, closest first.
    """
    for fault in faults:
        wrong = ""
        known = {"module": modules, "collective": COLLECTIVES, **dict.fromkeys(OF_STATE, state)}
        names = known.get(fault.site, ops)
        if fault.step >= steps:
            wrong, valid = f"step {fault.step} is not in this run", f"0 to {steps - 1}"
        elif fault.rank >= ranks:
            wrong, valid = f"rank {fault.rank} is not in this run", f"0 to {ranks - 1}"
        elif fault.host is not None and (nodes == 1 or fault.host >= nodes):
            wrong = f"host {fault.host} cannot be lost in this run"
            valid = f"0 to {nodes - 1}" if nodes > 1 else "none, as it is a run of a single host"
        elif fault.op and fault.op not in names:
            wrong = f"op {_shown(fault.op)} is not a {_target(fault.site)} of this model"
            valid = _choices(fault.op, names)
        if wrong:
            raise ConfigError(f"fault {fault.identifier + 1}: {wrong}; valid: {valid}")


def dump_schedule(faults: Sequence[Fault]) -> str:
    """Write a schedule as TOML that ``parse_schedule`` reads back equal.

    Identifiers are positions and are not written.
    """
    return "\n".join(_table(fault) for fault in faults)


def _table(fault: Fault) -> str:
    if fault.host is not None:
        return f'[[fault]]\nstep = {fault.step}\nkind = "{fault.kind}"\nhost = {fault.host}\n'
    lines = ["[[fault]]", f"step = {fault.step}", f"rank = {fault.rank}"]
    lines += [f"{key} = {_quoted(getattr(fault, key))}" for key in ("kind", "site", "op")]
    if fault.bit is not None:
        lines.append(f"bit = {fault.bit}")
    if fault.index is not None:
        lines.append(f"index = {list(fault.index)}")
    if fault.value is not None:
        lines.append(f"value = {float(fault.value)!r}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _target(site: str) -> str:
    if site in TILE_SITES:
        return "fused attention"
    names = {"module": "module", "collective": "collective"}
    return names.get(site, "tensor of the state" if site in OF_STATE else "matmul")


def _shown(value: object) -> str:
    """Return the ``repr`` of a value on one line and of bounded length."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN_LENGTH
    return short.repr(value)


def _choices(wanted: str, valid: Collection[str]) -> str:
    """List the valid names, closest first, as many as fit a readable line."""
    closest = difflib.get_close_matches(wanted, valid, n=3, cutoff=0.4)
    names = [*closest, *sorted(set(valid) - set(closest))]
    shown, length = 0, 0
    while shown < len(names) and (length := length + len(names[shown]) + 2) <= _CHOICES_LENGTH:
        shown += 1
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest else "") or "none"
