"""A fault-injection campaign on a model: many runs with one fault each, compared with one without.

Every trial draws its batch, its place and its bits from the seed and its own number, so the results
depend neither on the number of workers nor on interruptions.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
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
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.inject.journal import Journal
from holdfast.inject.outcomes import Outcome, equal, outcome_of, tensors_of
from holdfast.inject.results import Results
from holdfast.inject.run_state import Hang, RunState, deadline
from holdfast.inject.targets import PASSING, Faults, Site, Strike, Watch, named_sites, striking
from holdfast.inject.worker_pool import one_thread, run_jobs
from holdfast.sites import OUTSIDE

Run = Callable[[nn.Module, Any], Any]

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

    Outcomes: ``masked`` (the outputs count as right, nothing was reported), ``silent`` (they do
    not, nothing was reported: silent data corruption), ``corrected`` (holdfast reported the fault,
    and the outputs are right bit for bit), ``detected`` (it was reported, and the outputs differ,
    or the run was refused), ``crash`` (the run raised or its process died), ``hang`` (it took more
    than ``timeout_s``), ``not_injected`` (no element can have the fault, or none was reached).

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
        optimizer: Its state is put back after each trial, and can be struck if it has stepped.
        seed: Of everything drawn, and of torch's generators at the start of every run.
        workers: Number of processes, forks of this one with one thread each. A trial that kills its
            process is counted as a crash with two or more; with one it ends the campaign.
        timeout_s: Longest time of a run; by default 20 times that of the golden run, at least 10 s.
        resume: File of finished trials. If it exists, the campaign continues where it was.

    Guarantees: parameters, buffers, the optimizer and torch's random state are afterwards as
    before, bit for bit, gradients None. The same seed gives the same results on the same machine.

    Not covered: integer tensors; layers inside graphs of ``torch.compile``; state of the model
    outside parameters, buffers and plain attributes; with several workers, models on CUDA.

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
    with (
        torch.random.fork_rng(devices=[] if cuda is None else [cuda]),
        Watch(model) as watch,
        one_thread(),
    ):
        trial = _Trials(model, watch, batches, outcome, run, optimizer, seed, timeout_s)
        trial.plan(chosen, trials, per_layer)
        return Results(_run_all(trial, workers, resume))


def _run_all(
    trial: "_Trials", workers: int, resume: str | PathLike[str] | None
) -> list[dict[str, Any]]:
    numbers, console = range(len(trial.planned)), Console(stderr=True)
    path, header = (None, {}) if resume is None else (Path(resume), trial.identity())
    with closing(Journal(path, header)) as journal:
        left = [number for number in numbers if str(number) not in journal.done]
        limit_s = 2 * trial.timeout_s + 5  # for a trial that does not let its own alarm be heard
        rows = run_jobs(trial, left, workers=workers, timeout_s=limit_s, lost=trial.lost)
        bar = Progress(console=console, auto_refresh=False, disable=not console.is_terminal)
        with closing(rows), bar:  # which ends the workers
            for row in bar.track(rows, len(numbers), len(journal.done), description="trials"):
                journal.append({str(row["trial"]): row})
        return [journal.done[str(number)] for number in numbers]


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
        self._state = RunState(model, optimizer, parameters=run is not None)
        self._state.restore()  # and the gradients that there may be are dropped
        self.planned: list[tuple[Faults, Site]] = []
        numbers = range(len(batches))
        self._golden = [self._clean(number) for number in numbers]
        self._judge = outcome_of(outcome, self._golden[0])
        # Apart, as products that are watched may be rounded by another kernel.
        self._calls = [self._counted(number) for number in numbers]
        with _listening() as heard:
            started_s = time.monotonic()
            again = [self._clean(number) for number in numbers]
            took_s = time.monotonic() - started_s
        if not all(self._judge(*both) is True for both in zip(self._golden, again, strict=True)):
            raise ConfigError(
                "two runs of the same batch without a fault give other results; make the model "
                "deterministic, or give an outcome that allows for it"
            )
        if heard:
            raise ConfigError(f"the run without a fault reports {heard[0]}; see events.recent()")
        self.timeout_s = timeout_s or max(LEAST_S, SLOWEST * took_s)
        run_name, name = (getattr(each, "__qualname__", "") for each in (run, self._judge))
        self._settings = {"seed": seed, "timeout_s": timeout_s, "run": run_name, "outcome": name}

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
            hints = {
                "product": "; protect the model",
                "optimizer": "; give optimizer=, after one step has made its state",
            }
            raise ConfigError(
                f"no layer of the model fits {faults}; layers with {faults.what}: "
                f"{', '.join(layers)[:400] or 'none'}{hints.get(faults.what, '')}"
            )
        return fitting

    def identity(self) -> dict[str, Any]:
        """Return all that the results depend on, except the environment, large parts as digests."""
        faults = [str((f.name, f.what, f.layers, f.index, site)) for f, site in self.planned]
        # Products of no module are seen only once protect was used in the process.
        named = [[(s, n) for s, n in c.items() if s.layer != OUTSIDE] for c in self._calls]
        calls = [sorted(map(str, each)) for each in named]
        optimizer = [self._state.groups, list(self._state.optimizer.values())]
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return self._settings | {
            "trials": len(faults),
            "plan": state_digest([faults, calls]),
            "model": state_digest([optimizer, tensors]),
            "inputs": state_digest(tensors_of(self._batches)),
            "outputs": state_digest(tensors_of(self._golden)),
        }

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

    def _counted(self, batch: int) -> Counter[Site]:
        calls: Counter[Site] = Counter()
        with self._watch.acting(lambda site, _: calls.update([site]), products=True):
            self._clean(batch)
        return calls

    def __call__(self, number: int) -> dict[str, Any]:
        """Run a trial; return its row of the results."""
        row, faults, site, generator = self._drawn(number)
        layer = dict(self._model.named_modules()).get(site.layer, self._model)
        strike, batch = Strike(faults, site, layer, generator), row["batch"]
        tensors = dict(named_sites(self._model, self._optimizer))
        with _listening() as heard:
            try:
                struck = striking(tensors, self._watch, site, row["call"], strike)
                outcome, detail = self._struck(batch, struck, heard)
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

    def _struck(
        self, batch: int, struck: AbstractContextManager[None], heard: list[str]
    ) -> tuple[str, str]:
        """Run a batch with a fault; return the outcome and what an error said."""
        try:
            with deadline(self.timeout_s), struck:
                outputs = self._pass(batch)
            if heard:
                return "corrected" if equal(self._golden[batch], outputs) else "detected", ""
            verdict = self._judge(self._golden[batch], outputs)
            return verdict if isinstance(verdict, str) else ("silent", "masked")[bool(verdict)], ""
        except Hang:
            return "hang", ""
        except ConfigError:
            raise
        except UncorrectableFault as error:
            return "detected", str(error)
        except Exception as error:
            return "crash", f"{type(error).__name__}: {error}"

    def lost(self, number: int, exit_code: int | None) -> dict[str, Any]:
        """Return the row of a trial whose process died with a code, or took too long (None)."""
        row, *_ = self._drawn(number)
        detail = "" if exit_code is None else f"the process died (exit code {exit_code})"
        return row | {"detail": detail, "outcome": "hang" if exit_code is None else "crash"}

    def _drawn(self, number: int) -> tuple[dict[str, Any], Faults, Site, torch.Generator]:
        faults, site = self.planned[number]
        draw = random.Random(f"{self._seed}/{number}")
        batch = draw.randrange(len(self._batches))
        row = {"trial": number, **site._asdict(), "fault": faults.name, "batch": batch}
        row["call"] = draw.randrange(self._calls[batch][site] or 1)
        row |= dict.fromkeys(("index", "before", "after", "elements"))
        return row, faults, site, torch.Generator().manual_seed(draw.getrandbits(63))


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect the kinds of the events that are recorded while the context is open."""
    heard: list[str] = []
    stop = events.subscribe(lambda event: heard.append(event.kind))
    try:
        yield heard
    finally:
        stop()
