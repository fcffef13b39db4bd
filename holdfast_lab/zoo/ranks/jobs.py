"""Jobs of several ranks: processes that are started, waited for, and started again if one dies."""

import json
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from holdfast.snapshot.node import launch
from holdfast_lab.zoo.ranks import rank
from holdfast_lab.zoo.ranks.loops import LOOPS
from holdfast_lab.zoo.ranks.rank import HANG_S, PATIENCE_S, Scenario, Work

_POLL_S = 0.02
_LOG_CHARACTERS = 3000

Lines = dict[str, list[dict[str, Any]]]  # what the ranks said, by the scenario's name


class JobFailed(Exception):
    """A rank ended otherwise than it was to; the message has the ends of the logs."""


def run(loop: str, seed: int, scenarios: list[Scenario], folder: Path) -> Lines:
    """Run scenarios of a loop on all its ranks; the last may kill one, and all start again.

    Raises:
        JobFailed: A rank failed, or did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = Work(loop, seed, tuple(scenarios), folder)
    try:
        lines = _attempted(work, killed=scenarios[-1].kind == "kill")
        if scenarios[-1].kind == "kill":
            again = replace(work, scenarios=(scenarios[-1],), attempt=1)
            lines |= _attempted(again, killed=False)
    finally:
        for scenario in scenarios:
            for node in range(LOOPS[loop].nodes):
                launch.stop_smp(work.run_dir(scenario, node))
    return lines


def _attempted(work: Work, *, killed: bool) -> Lines:
    """Start the ranks once and wait for their end; ``killed`` if one of them is to be killed."""
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo at its first use: most of what starting a rank costs.
    context.set_forkserver_preload([rank.__name__, "torch._dynamo"])
    count = LOOPS[work.loop].ranks
    ranks = [context.Process(target=rank.main, args=(work, n), daemon=True) for n in range(count)]
    for process in ranks:
        process.start()
    try:
        codes = _ends(ranks, killed=killed)
    finally:
        for process in ranks:
            process.kill()
            process.join(PATIENCE_S)
    if None in codes or (-9 in codes) != killed or (not killed and any(codes)):
        logs = [work.log(n).read_text()[-_LOG_CHARACTERS:] for n in range(count)]
        raise JobFailed(f"the ranks ended with {codes}:\n" + "\n".join(logs))
    return _heard(work, count)


def _ends(ranks: list[ForkServerProcess], *, killed: bool) -> list[int | None]:
    """Wait until all ranks have ended, or one failed; return their exit codes by then.

    If one is ``killed``, the others have to end by themselves, as none may wait for it for ever.
    """
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        if None not in codes or (any(codes) and not killed):
            break
        time.sleep(_POLL_S)
    return [process.exitcode for process in ranks]


def _heard(work: Work, count: int) -> Lines:
    heard: Lines = {}
    for number in range(count):
        path = work.said(number)
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            heard.setdefault(line["name"], []).append(line)
    return heard
