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
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
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
from holdfast.inject.worker_pool import run_jobs

Run = Callable[[nn.Module, Any], Any]
Outcome = Callable[[Any, Any], bool | str]

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
    if timeout_s is not None and timeout_s <= 0:
        raise ConfigError(f"timeout_s = {timeout_s} must be more than 0 seconds")
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
            trial = _Trials(model, watch, batches, outcome, run, optimizer, seed, timeout_s)
            trial.plan(chosen, trials, per_layer)
            return Results(_run_all(trial, workers, resume))
        finally:
            torch.set_num_threads(threads)


def _run_all(
    trial: "_Trials", workers: int, resume: str | PathLike[str] | None
) -> list[dict[str, Any]]:
    keys = [str(number) for number in range(len(trial.planned))]
    console = Console(stderr=True)
    with ExitStack() as stack:
        kept = None
        if resume is not None:
            kept = stack.enter_context(
                closing(Journal(Path(resume), {"campaign": trial.digest()}, keys))
            )
        done = {} if kept is None else kept.done
        left = [int(key) for key in keys if key not in done]
        limit_s = 2 * trial.timeout_s + 5  # for a trial that does not let its own alarm be heard
        rows = run_jobs(trial, left, workers=workers, timeout_s=limit_s, lost=trial.lost)
        stack.callback(rows.close)  # which ends the workers
        bar = Progress(console=console, auto_refresh=False, disable=not console.is_terminal)
        with bar:
            for row in bar.track(rows, len(keys), len(done), description="trials"):
                done[str(row["trial"])] = row
                if kept is not None:
                    kept.append({str(row["trial"]): row})
        return [done[key] for key in keys]


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
        outcome: str | Outcome | None,
        run: Run | None,
        optimizer: Optimizer | None,
        seed: int,
        timeout_s: float | None,
    ) -> None:
        self._model, self._batches, self._optimizer = model, batches, optimizer
        self._watch, self._run, self._seed = watch, run or _forward, seed
        self._state = _State(model, optimizer, parameters=run is not None)
        self._state.restore()  # and the gradients that there may be are dropped
        self._calls: list[Counter[Site]] = []
        self._golden = []
        for number in range(len(batches)):
            self._golden.append(self._clean(number))
            calls: Counter[Site] = Counter()
            # Apart, as products that are watched may be rounded by another kernel.
            with watch.acting(partial(_count, calls), products=True):
                self._clean(number)
            self._calls.append(calls)
        self._judge = _judge(outcome, self._golden[0])
        with _listening() as heard:
            started_s = time.monotonic()
            for number, golden in enumerate(self._golden):
                if self._judge(golden, self._clean(number)) is not True:
                    raise ConfigError(
                        "two runs of the same batch without a fault give other results; make the "
                        "model deterministic, or give an outcome that allows for it"
                    )
        if heard:
            raise ConfigError(f"the run without a fault reports {heard[0]}; see events.recent()")
        self.timeout_s = timeout_s or max(LEAST_S, SLOWEST * (time.monotonic() - started_s))
        what = getattr(run, "__qualname__", "")
        self._settings = [seed, timeout_s, what, getattr(self._judge, "__qualname__", "")]
        self.planned: list[tuple[Faults, Site]] = []

    def plan(self, chosen: Sequence[Faults], trials: int, per_layer: bool) -> None:
        """Share the trials out to the faults, then those of each to its places."""
        places = [(faults, self._fitting(faults)) for faults in chosen]
        for turn, (faults, found) in enumerate(places, 1):
            until = turn * trials // len(places)
            share = trials * len(found) if per_layer else until - len(self.planned)
            self.planned += [(faults, found[k * len(found) // share]) for k in range(share)]

    def _fitting(self, faults: Faults) -> list[Site]:
        modules = dict(self._model.named_modules())
        named = named_sites(self._model, self._optimizer)
        held = [site for site, tensor in named if tensor.is_floating_point()]
        sites = list(dict.fromkeys([*chain(*self._calls), *held]))
        fitting = [s for s in sites if faults.strikes(s, modules.get(s.layer, self._model))]
        if not fitting:
            layers = dict.fromkeys(site.layer for site in sites if site.what == faults.what)
            hint = "; protect the model" if faults.what == "product" else ""
            raise ConfigError(
                f"no layer of the model fits {faults}; layers with {faults.what}: "
                f"{', '.join(layers)[:400] or 'none'}{hint}"
            )
        return fitting

    def digest(self) -> str:
        """Return a digest of all that the results depend on, except the environment."""
        plan = Counter(
            str((f.name, f.what, f.layers, f.samples, f.index, site)) for f, site in self.planned
        )
        state = [self._state.tensors, self._state.groups, list(self._state.optimizer.values())]
        calls = [sorted(map(str, each.items())) for each in self._calls]
        tensors = _tensors([self._model.state_dict(), self._batches, self._golden])
        return state_digest([self._settings, dict(plan), calls, state, tensors])

    def _pass(self, batch: int) -> Any:
        """Run a copy of a batch, and return copies of the outputs."""
        torch.manual_seed(self._seed)
        copied = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().clone().requires_grad_(t.requires_grad),
            self._batches[batch],
        )
        outputs = self._run(self._model, copied)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)

    def _clean(self, batch: int) -> Any:
        try:
            return self._pass(batch)
        finally:
            self._state.restore()

    def __call__(self, number: int) -> dict[str, Any]:
        """Run a trial; return its row of the results."""
        row, faults, site, generator = self._drawn(number)
        module = dict(self._model.named_modules()).get(site.layer, self._model)
        if site.what not in PASSING or "/grad" in site.name:
            module = nn.Identity()  # its output, to which it adds a bias, is not struck
        strike, detail, batch = Strike(faults, module, generator), "", row["batch"]
        tensors = dict(named_sites(self._model, self._optimizer))
        with _listening() as heard:
            try:
                struck = striking(tensors, self._watch, site, row["call"], strike)
                with _deadline(self.timeout_s), struck:
                    outputs = self._pass(batch)
                outcome = self._outcome(batch, outputs, bool(heard))
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
                self._state.restore()
        if heard and site.what not in PASSING:
            self._clean(batch)  # what was kept of the wrong values is renewed
        detail = detail or ", ".join(dict.fromkeys(heard))
        if not strike.record:
            why = "no element can have this fault" if strike.reached else "never reached"
            outcome, detail = "not_injected", "; ".join(filter(None, (why, detail)))
        return row | strike.record | {"detail": detail[:DETAIL], "outcome": outcome}

    def lost(self, number: int, exit_code: int | None) -> dict[str, Any]:
        """Return the row of a trial whose process died with a code, or took too long (None)."""
        row, *_ = self._drawn(number)
        detail = "" if exit_code is None else f"the process died (exit code {exit_code})"
        return row | {"detail": detail, "outcome": "hang" if exit_code is None else "crash"}

    def _drawn(self, number: int) -> tuple[dict[str, Any], Faults, Site, torch.Generator]:
        faults, site = self.planned[number]
        draw = random.Random(f"{self._seed}/{number}")
        batch = draw.randrange(len(self._batches))
        row = {"trial": number, "layer": site.layer, "what": site.what, "name": site.name}
        row |= {"fault": faults.name, "batch": batch}
        row["call"] = draw.randrange(self._calls[batch][site] or 1)
        row |= dict.fromkeys(("index", "before", "after", "elements"))
        return row, faults, site, torch.Generator().manual_seed(draw.getrandbits(63))

    def _outcome(self, batch: int, outputs: Any, reported: bool) -> str:
        golden = self._golden[batch]
        if reported:
            return "corrected" if _equal(golden, outputs) else "detected"
        verdict = self._judge(golden, outputs)
        return verdict if isinstance(verdict, str) else "masked" if verdict else "silent"


def _count(calls: Counter[Site], site: Site, tensor: torch.Tensor) -> None:
    calls[site] += 1


class _State:
    """Copies of what a run may change, from which it is put back, and under its names."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, parameters: bool) -> None:
        # The parameters only if a run may change them: a write makes protection encode them anew.
        stores = [m._buffers for m in model.modules()]
        stores += [m._parameters for m in model.modules()] if parameters else []  # type: ignore[misc]
        self._live = [(store, key, live) for store in stores for key, live in store.items()]
        self.tensors = [live if live is None else live.detach().clone() for *_, live in self._live]
        self._parameters = list(model.parameters())
        self._of = optimizer
        self.optimizer = {} if optimizer is None else _copied(optimizer.state)
        self.groups = [] if optimizer is None else [_copied(g) for g in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        for (store, key, live), kept in zip(self._live, self.tensors, strict=True):
            store[key] = live if live is None or kept is None else live.copy_(kept)
        for parameter in self._parameters:
            parameter.grad = None
        if self._of is not None:  # load_state_dict would cast the state to the parameters' dtype
            self._of.state.clear()
            self._of.state.update(_copied(self.optimizer))
            for group, values in zip(self._of.param_groups, self.groups, strict=True):
                group.update(_copied(values))


def _copied(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy the values of an optimizer's state or group, but not the parameters themselves."""
    return {key: copy.deepcopy(value) for key, value in values.items() if key != "params"}


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
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # an alarm of the program itself, which goes on
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started_s), 1e-3))


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
    right, new = _tensors(golden), _tensors(outputs)
    return len(right) == len(new) and all(
        a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(right, new, strict=True)
    )


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
