"""A fault-injection campaign on a model: many runs with one fault each, compared with one without.

Every trial draws its batch, its place and its bits from the seed and its own number, so the results
depend neither on the number of workers nor on interruptions.
"""

import copy
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from holdfast import events
from holdfast.digest.tensors import state_digest, tensors_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.inject.journal import Journal
from holdfast.inject.results import Results
from holdfast.inject.targets import (
    PASSING,
    Faults,
    Site,
    Strike,
    Watch,
    first_tensor,
    named_sites,
    striking,
)
from holdfast.inject.worker_pool import WorkerPool

Run = Callable[[nn.Module, Any], Any]
Outcome = Callable[[Any, Any], bool | str]

QUIET_S = 2.0  # before progress is shown
DETAIL = 200  # characters of what a crash or a detection says
# A run hangs after so many times the time of the golden run, at least after so long.
SLOWEST, LEAST_S = 20, 10.0


def campaign(
    model: nn.Module,
    inputs: Any,
    *,
    outcome: str | Outcome | None = None,
    faults: str | Faults | Iterable[str | Faults] = "flip",
    trials: int = 1000,
    per_layer: bool = False,
    run: Run | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    workers: int = 1,
    timeout_s: float | None = None,
    resume: str | PathLike[str] | None = None,
) -> Results:
    """Run a model once without a fault and ``trials`` times with one, and classify what came out.

    ====================  =========================================================================
    masked                the outputs count as right, nothing was reported
    silent                they do not, and nothing was reported: silent data corruption
    corrected             holdfast reported the fault, and the outputs are right bit for bit
    detected              it was reported, and the outputs differ, or the run was refused
    crash, hang           the run raised or its process died, or it took more than ``timeout_s``
    not_injected          no element can have the fault (``flip-30-up``), or none was reached
    ====================  =========================================================================

    Args:
        model: Any module, in the mode in which it is to run; protect it before to see detections.
        inputs: One batch, a tensor, tuple or dict of arguments; or a list or loader of batches, of
            which each trial draws one. All of them are kept.
        outcome: When outputs count as right: ``"argmax"`` (no largest entry of the first output
            changed its place, nothing became INF or NaN; along dimension 1 of images, else the
            last one), ``"allclose"`` (``torch.allclose`` of every output), ``"equal"``, or a
            function of the golden and the faulty outputs that returns a bool, or the name of a
            class of your own. By default ``"argmax"`` for outputs of two dimensions or more, else
            ``"allclose"``.
        faults: Fault models by name, or ``Faults``, which also say where.
        trials: Number of trials, spread evenly over all faults and their places.
        per_layer: True for so many trials at each place instead.
        run: Function of model and batch that returns the outputs, by default a forward pass without
            gradients. A training step fits: forward, backward, ``optimizer.step()``, the loss.
        optimizer: Its state is put back after each trial, and can be struck.
        seed: Of everything drawn, and of torch's generators at the start of every run.
        workers: Number of processes, forks of this one with one thread each. A trial that kills its
            process is counted as a crash with two or more; with one it ends the campaign.
        timeout_s: Longest time of a run; by default 20 times that of the golden run, at least 10 s.
        resume: File of finished trials. If it exists, the campaign continues where it was.

    Guarantees: parameters, buffers, the optimizer and torch's random state are afterwards as
    before, bit for bit, gradients None. The same seed gives the same results on the same machine.

    Not covered: integer tensors; layers inside graphs of ``torch.compile``; state of the model
    outside parameters and buffers; with several workers, models on a CUDA device.

    Raises:
        ConfigError: An argument is out of range, no place fits ``faults``, two runs without faults
            differ, or ``resume`` is of another campaign.
    """
    if trials < 1 or workers < 1:
        raise ConfigError(f"trials = {trials} and workers = {workers} must be at least 1")
    cuda = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if workers > 1 and cuda is not None:
        raise ConfigError(f"workers = {workers}: a model on {cuda} needs workers=1")
    given = [faults] if isinstance(faults, str | Faults) else list(faults)
    chosen = [Faults(each) if isinstance(each, str) else each for each in given]
    batches = _batches(inputs)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[] if cuda is None else [cuda]), Watch(model) as watch:
        torch.set_num_threads(1)  # as in every worker: more would sum in another order
        try:
            trial = _Trials(
                model, watch, batches, chosen, outcome, run or _forward, optimizer, seed
            )
            trial.plan(trials, per_layer)
            trial.timeout_s = timeout_s or trial.timeout_s
            return Results(_run_all(trial, workers, resume))
        finally:
            torch.set_num_threads(threads)


def _run_all(
    trial: "_Trials", workers: int, resume: str | PathLike[str] | None
) -> list[dict[str, Any]]:
    count = len(trial.planned)
    pool = WorkerPool(workers, trial, timeout_s=2 * trial.timeout_s + 5, lost=trial.lost)
    if resume is None:
        found = {row["trial"]: row for row in _shown(pool.run(range(count)), 0, count)}
        return [found[number] for number in range(count)]
    keys = [str(number) for number in range(count)]
    with closing(Journal(Path(resume), {"campaign": trial.digest()}, keys)) as kept:
        left = [number for number in range(count) if str(number) not in kept.done]
        for row in _shown(pool.run(left), count - len(left), count):
            kept.append({str(row["trial"]): row})
        return [kept.done[key] for key in keys]


def _shown(rows: Iterable[dict[str, Any]], done: int, total: int) -> Iterator[dict[str, Any]]:
    """Pass rows on, and show on standard error how many there are if this takes a while."""
    from rich.console import Console
    from rich.progress import Progress

    console, quiet_until_s = Console(stderr=True), time.monotonic() + QUIET_S
    bar = Progress(console=console, auto_refresh=False, disable=not console.is_terminal)
    task = bar.add_task("trials", total=total, completed=done)
    try:
        for row in rows:
            bar.advance(task)
            if time.monotonic() > quiet_until_s:
                bar.start()
                bar.refresh()
            yield row
    finally:
        bar.live.stop()


def _batches(inputs: Any) -> list[Any]:
    one = isinstance(inputs, torch.Tensor | tuple | Mapping)
    batches = [inputs] if one else list(inputs)
    if not batches:
        raise ConfigError("inputs has no batch; give a tensor, a tuple, a dict or a loader")
    return batches


def _forward(model: nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)


class _Hang(BaseException):
    """The run took too long; not an Exception, which the run itself could catch."""


class _Trials:
    """Runs one trial by its number."""

    def __init__(
        self,
        model: nn.Module,
        watch: Watch,
        batches: Sequence[Any],
        faults: Sequence[Faults],
        outcome: str | Outcome | None,
        run: Run,
        optimizer: Optimizer | None,
        seed: int,
    ) -> None:
        self._model, self._batches, self._optimizer = model, batches, optimizer
        self._watch, self._run, self._seed, self._faults = watch, run, seed, faults
        self._state = _State(model, optimizer, forward=run is _forward)
        self._state.restore()  # and the gradients that there may be are dropped
        calls: Counter[Site] = Counter()
        with watch.acting(lambda site, tensor: calls.update([site]), products=True):
            first, *_ = self._golden = [self._pass(batch) for batch in batches]
        calls = Counter({site: -(-number // len(batches)) for site, number in calls.items()})
        self._judge = _judge(outcome, first)
        with _listening() as heard:
            started_s = time.monotonic()
            for batch, golden in zip(batches, self._golden, strict=True):
                if self._judge(golden, self._pass(batch)) is not True:
                    raise ConfigError(
                        "two runs of the same batch without a fault give other results; make the "
                        "model deterministic, or give an outcome that allows for it"
                    )
        if heard:
            raise ConfigError(f"the run without a fault reports {heard[0]}; see events.recent()")
        self.timeout_s = max(LEAST_S, SLOWEST * (time.monotonic() - started_s))
        named = named_sites(model, optimizer)
        held = [site for site, tensor in named if tensor.is_floating_point()]
        self._calls, self._sites = calls, [*calls, *held]
        self.planned: list[tuple[Faults, Site]] = []

    def plan(self, trials: int, per_layer: bool) -> None:
        """Share the trials out to the faults, then those of each to its places."""
        places = [(faults, self._fitting(faults)) for faults in self._faults]
        for turn, (faults, found) in enumerate(places, 1):
            until = turn * trials // len(places)
            share = trials * len(found) if per_layer else until - len(self.planned)
            self.planned += [(faults, found[k * len(found) // share]) for k in range(share)]

    def _fitting(self, faults: Faults) -> list[Site]:
        modules = dict(self._model.named_modules())
        of_model = lambda site: modules.get(site.layer, self._model)  # noqa: E731
        fitting = [site for site in self._sites if faults.strikes(site, of_model(site))]
        if not fitting:
            layers = dict.fromkeys(s.layer for s in self._sites if s.what == faults.what)
            hint = "; protect the model" if faults.what == "product" else ""
            raise ConfigError(
                f"no layer of the model fits {faults}; layers with {faults.what}: "
                f"{', '.join(layers)[:400] or 'none'}{hint}"
            )
        return fitting

    def digest(self) -> str:
        """Return a digest of all that the results depend on, except the environment."""
        plan = [(f.name, f.what, str(f.layers), f.samples, str(f.index)) for f in self._faults]
        tensors = _tensors([self._model.state_dict(), self._batches, self._golden])
        judge = getattr(self._judge, "__qualname__", "")
        header = {"seed": self._seed, "trials": len(self.planned), "faults": plan, "judge": judge}
        return state_digest(header | {"tensors": tensors})

    def _pass(self, batch: Any) -> Any:
        """Run a batch and keep copies of what it returns; everything else is put back."""
        torch.manual_seed(self._seed)
        try:
            outputs = self._run(self._model, batch)
            return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        finally:
            self._state.restore()

    def __call__(self, number: int) -> dict[str, Any]:
        """Run a trial; return its row of the results."""
        row, faults, site, generator = self._drawn(number)
        module = dict(self._model.named_modules()).get(site.layer, self._model)
        strike, detail, outputs = Strike(faults, module, generator), "", None
        place = site, row["call"]
        struck = striking(self._model, self._optimizer, self._watch, place, strike)
        with _listening() as heard:
            try:
                with _deadline(self.timeout_s), struck:
                    outputs = self._pass(self._batches[row["batch"]])
                outcome = self._outcome(row["batch"], outputs, bool(heard))
            except _Hang:
                outcome = "hang"
            except ConfigError:
                raise
            except UncorrectableFault as error:
                outcome, detail = "detected", str(error)
            except Exception as error:
                outcome, detail = "crash", f"{type(error).__name__}: {error}"
            finally:
                strike.undo()
        if heard and site.what not in PASSING:
            self._pass(self._batches[row["batch"]])  # what was kept of the wrong values is renewed
        detail = detail or ", ".join(dict.fromkeys(heard))
        row |= {**strike.record, "detail": detail[:DETAIL]}
        return row | {"outcome": outcome if strike.record else "not_injected"}

    def lost(self, number: int, exit_code: int | None) -> dict[str, Any]:
        """Return the row of a trial whose process died with a code, or took too long (None)."""
        row, *_ = self._drawn(number)
        detail = "" if exit_code is None else f"the process died (exit code {exit_code})"
        return row | {"outcome": "hang" if exit_code is None else "crash", "detail": detail}

    def _drawn(self, number: int) -> tuple[dict[str, Any], Faults, Site, torch.Generator]:
        faults, site = self.planned[number]
        draw = random.Random(f"{self._seed}/{number}")
        row = {
            "trial": number,
            "layer": site.layer,
            "what": site.what,
            "name": site.name,
            "fault": faults.name,
            "batch": draw.randrange(len(self._batches)),
            "call": draw.randrange(self._calls.get(site, 1)),
        } | dict.fromkeys(("index", "before", "after", "elements"))
        return row, faults, site, torch.Generator().manual_seed(draw.getrandbits(63))

    def _outcome(self, batch: int, outputs: Any, reported: bool) -> str:
        golden = self._golden[batch]
        if reported:
            same = tensors_digest(_tensors(outputs)) == tensors_digest(_tensors(golden))
            return "corrected" if same else "detected"
        verdict = self._judge(golden, outputs)
        return verdict if isinstance(verdict, str) else "masked" if verdict else "silent"


class _State:
    """Copies of what a run may change, from which it is put back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, forward: bool) -> None:
        # A forward pass changes no parameter; batch norm's statistics keep their version counters.
        changing = () if forward else model.parameters()
        self._live = [*changing, *model.buffers()]
        self._parameters = list(model.parameters())
        self.tensors = [live.detach().clone() for live in self._live]
        self._optimizer = optimizer
        self._kept = None if optimizer is None else copy.deepcopy(optimizer.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        for live, kept in zip(self._live, self.tensors, strict=True):
            live.copy_(kept)
        for parameter in self._parameters:
            parameter.grad = None
        if self._optimizer is not None and self._kept is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._kept))


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect the kinds of the events that are recorded while the context is open."""
    heard: list[str] = []
    stop = events.subscribe(lambda event: heard.append(event.kind))
    try:
        yield heard
    finally:
        stop()


@contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    """Raise _Hang in the main thread when the time is over; elsewhere nothing is watched."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise _Hang

    handler = signal.signal(signal.SIGALRM, over)
    started_s, (left_s, _) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # an alarm of the program itself, which goes on
            rest_s = left_s - (time.monotonic() - started_s)
            signal.setitimer(signal.ITIMER_REAL, max(rest_s, 1e-3))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _same_argmax(golden: Any, outputs: Any) -> bool:
    right, new = first_tensor(golden), first_tensor(outputs)
    if right is None or new is None or right.shape != new.shape:
        return False
    dim = 1 if right.dim() > 3 else -1
    same = torch.equal(right.argmax(dim), new.argmax(dim))
    return same and torch.equal(right.isfinite(), new.isfinite())


def _all_close(golden: Any, outputs: Any) -> bool:
    pairs = list(zip(_tensors(golden), _tensors(outputs), strict=False))
    return all(a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def _equal(golden: Any, outputs: Any) -> bool:
    return tensors_digest(_tensors(golden)) == tensors_digest(_tensors(outputs))


OUTCOMES: dict[str, Outcome] = {"argmax": _same_argmax, "allclose": _all_close, "equal": _equal}


def _judge(outcome: str | Outcome | None, golden: Any) -> Outcome:
    """Return the function that says whether outputs count as right."""
    if callable(outcome):
        return outcome
    first = first_tensor(golden)
    if first is None:
        raise ConfigError(
            f"the run returns {type(golden).__name__}, without a tensor to compare; give run= a "
            "function that returns one, or an outcome of your own"
        )
    chosen = outcome or ("argmax" if first.dim() > 1 else "allclose")
    if chosen not in OUTCOMES:
        raise ConfigError(f"outcome = {outcome!r}; use a function or one of {', '.join(OUTCOMES)}")
    return OUTCOMES[chosen]
