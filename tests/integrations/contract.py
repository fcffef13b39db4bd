"""What every adapter to a training framework must do, tested with the real framework.

An adapter's test file writes one ``Program``, a tiny training run by the framework's own trainer,
and a subclass of ``AdapterContract`` that names it::

    class TestTransformers(AdapterContract):
        program = TrainerProgram
        adapter = holdfast.integrations.transformers
"""

import ast
import inspect
import json
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from holdfast import ConfigError, events, protect
from holdfast.digest.tensors import state_digest, tensors_digest
from holdfast.protection import is_protected
from holdfast.snapshot.node.launch import stop_smp

INF, ONE_PERCENT = float("inf"), 1.01
EVALUATION = -1  # in the place of a micro-step's number
FORK_S = 60  # after which a fork is ended

Place = tuple[int, int]  # number of the step, number of the micro-step in it


class Program(ABC):
    """A tiny training run by a framework's own trainer, in which two instances do the same.

    The constructor seeds all generators and builds model, data and trainer, from a folder into
    which the framework may write. The run has dropout, clipping, a learning-rate schedule, shuffled
    batches, several epochs, and an evaluation somewhere.

    Attributes:
        model: The module that is trained, without a wrapper.
        struck: A part of it whose output is not a product's, such as a norm, that runs once in each
            micro-step.
        weight: A parameter that every pass reads.
        resumed: Step at which the trainer began to compute, set by ``watched``.
    """

    accumulation: ClassVar[int] = 3  # micro-steps of a step; at least 3
    steps: ClassVar[int] = 8  # of the whole run; at least 8
    epoch_steps: ClassVar[int] = 4  # of an epoch; at least 3
    evaluated_at: ClassVar[int] = 3  # steps done when the trainer evaluates for the first time

    model: nn.Module
    struck: nn.Module
    weight: nn.Parameter

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    @abstractmethod
    def attach(self, run_dir: Path | None, **settings: Any) -> None:
        """Add the lines that a user of holdfast adds."""

    @abstractmethod
    def train(self) -> None:
        """Run the whole training, or what is left of it."""

    def prolong(self) -> Place:
        """Let the next ``train`` do further steps, if need be; return a place in them."""
        return (2, 1)

    @abstractmethod
    def steps_done(self) -> int:
        """The framework's own count of the steps that were applied."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and logs after training; without times."""

    @abstractmethod
    def internals(self) -> list[tuple[object, str]]:
        """Objects of the framework (after training), with the private attributes used of each."""

    @contextmanager
    def watched(self, on_pass: Callable[[Place], Any]) -> Iterator[None]:
        """Call with the place of each forward pass; what it returns multiplies one activation.

        A pass that is repeated has a place of its own, beyond the step's micro-steps.
        """
        step, number = -1, 0
        self.resumed: int | None = None

        def hook(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor | None:
            nonlocal step, number
            if not module.training:
                on_pass((self.steps_done(), EVALUATION))
                return None
            if self.resumed is None:
                self.resumed = self.steps_done()
            step, number = self.steps_done(), number + 1 if self.steps_done() == step else 0
            factor = on_pass((step, number))
            if factor is None:
                return None
            output = output.clone()
            output.view(-1)[7] *= factor
            return output

        handle = self.struck.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


class Stop(Exception):
    """Ends a run before its end."""


class Striker:
    """Multiplies an activation at given places, once at each."""

    def __init__(self, faults: dict[Place, float]) -> None:
        self.faults, self.struck = faults, dict.fromkeys(faults, 0)

    def __call__(self, place: Place) -> float | None:
        if self.struck.get(place, 1):
            return None
        self.struck[place] += 1
        return self.faults[place]


class Damage:
    """Writes NaN into a weight at a given place, once."""

    def __init__(self, weight: nn.Parameter, place: Place) -> None:
        self.weight, self.place, self.done = weight, place, False

    def __call__(self, place: Place) -> None:
        if place == self.place and not self.done:
            self.done = True
            with torch.no_grad():
                self.weight.data.view(-1)[3] = float("nan")


def kill_places(program: type[Program]) -> list[Place]:
    """Where a life of the run ends, in order: steps 0 and 1, an evaluation, an epoch's end."""
    last, micro = program.epoch_steps - 1, program.accumulation - 1
    return [
        *((0, 1), (1, 0)),
        (program.evaluated_at, EVALUATION),
        *((last, micro), (last + 1, 0)),
        (program.steps - 1, micro),
    ]


def outcome(
    program: Program,
    on_pass: Callable[[Place], Any] = lambda place: None,
    *,
    run_dir: Path | None = None,
    **settings: Any,
) -> str:
    """Train and return the digest of the result; bare, but protected, without a run directory."""
    with ExitStack() as opened:
        if run_dir is None:
            opened.enter_context(protect(program.model))
        else:
            program.attach(run_dir, **settings)
        opened.enter_context(program.watched(on_pass))
        program.train()
    assert program.steps_done() == program.steps
    return state_digest(program.result())


def kinds(*names: str) -> list[tuple[str, int]]:
    """The events of these kinds so far, each with its step."""
    return [(str(event.kind), event.step) for event in events.recent() if event.kind in names]


class AdapterContract:
    """The tests. A subclass names the program and the module of the adapter."""

    program: ClassVar[type[Program]]
    adapter: ClassVar[ModuleType]
    _bare: ClassVar[dict[type[Program], str]] = {}

    @pytest.fixture
    def bare(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The digest of the run without an adapter, under ``protect``."""
        kept = AdapterContract._bare
        if self.program not in kept:
            folder = tmp_path_factory.mktemp("bare")
            kept[self.program] = outcome(self.program(folder))
            assert events.recent() == []
        return kept[self.program]

    def faults(self) -> dict[Place, float]:
        """INF, and one per cent, each in the first, a middle and the last micro-step of a step."""
        micro_steps = (0, 1, self.program.accumulation - 1)
        first = {(1 + n, micro): INF for n, micro in enumerate(micro_steps)}
        return first | {(4 + n, micro): ONE_PERCENT for n, micro in enumerate(micro_steps)}

    @pytest.mark.representative
    def test_a_healthy_run_has_the_bits_of_the_protected_bare_run(
        self, bare: str, run_dir: Path, tmp_path: Path
    ) -> None:
        program = self.program(tmp_path)
        assert outcome(program, run_dir=run_dir) == bare
        assert kinds("rerun", "rollback", "gemm_fault") == []
        self._check_internals(program)

    def _check_internals(self, program: Program) -> None:
        """Every private name of the framework that the adapter uses is listed, and exists."""
        named = program.internals()
        assert [name for owner, name in named if not hasattr(owner, name)] == []
        used = {
            node.attr
            for source in _sources(self.adapter)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        }
        assert used == {name for _, name in named}

    def test_faults_in_any_micro_step_are_repaired_bit_for_bit(
        self, bare: str, run_dir: Path, tmp_path: Path
    ) -> None:
        strike = Striker(self.faults())
        assert outcome(self.program(tmp_path), strike, run_dir=run_dir, audit=1.0) == bare
        assert set(strike.struck.values()) == {1}
        assert kinds("rerun") == [("rerun", step) for step, _ in self.faults()]
        assert kinds("rollback") == []

    def test_without_protection_each_of_these_faults_changes_the_weights(
        self, bare: str, tmp_path: Path
    ) -> None:
        for number, (place, factor) in enumerate(self.faults().items()):
            strike = Striker({place: factor})
            assert outcome(self.program(tmp_path / str(number)), strike) != bare, place
            assert set(strike.struck.values()) == {1}

    def test_a_weight_that_became_nan_is_rolled_back(
        self, bare: str, run_dir: Path, tmp_path: Path
    ) -> None:
        program = self.program(tmp_path)
        place = (self.program.epoch_steps, 1)
        damage = Damage(program.weight, place)
        assert outcome(program, damage, run_dir=run_dir, at_rest=0.0) == bare
        assert damage.done
        assert kinds("rollback") == [("rollback", place[0])]

    def test_frozen_parameters_and_neither_protection_nor_a_run_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path / "run"))

        def train(program: Program) -> str:
            program.weight.requires_grad_(False)
            frozen = tensors_digest([program.weight.detach()])
            with program.watched(lambda _: protected.append(is_protected(program.model))):
                program.train()
            assert tensors_digest([program.weight.detach()]) == frozen
            return state_digest(program.result())

        protected: list[bool] = []
        clean = train(self.program(tmp_path / "bare"))
        guarded = self.program(tmp_path / "guarded")
        guarded.attach(None, protect=False)
        assert train(guarded) == clean
        assert not any(protected)
        stop_smp(tmp_path / "run")

    def test_an_exception_leaves_the_guard_and_the_protection(
        self, run_dir: Path, tmp_path: Path
    ) -> None:
        for _ in range(2):  # the second one would be refused if the first were still guarded
            program = self.program(tmp_path)
            with pytest.raises(Stop):
                outcome(program, partial(_stop, program), run_dir=run_dir)
            assert not is_protected(program.model)

    def test_a_second_guard_is_refused(self, run_dir: Path, tmp_path: Path) -> None:
        program = self.program(tmp_path)

        def attach_twice() -> None:
            program.attach(run_dir)
            program.attach(run_dir)
            program.train()  # a callback is looked at when it begins

        with pytest.raises(ConfigError, match=r"has a Guard already: attach one, once"):
            attach_twice()

    def test_a_second_training_is_guarded_too(self, run_dir: Path, tmp_path: Path) -> None:
        def twice(name: str, factor: float, run_dir: Path | None = None) -> str:
            program = self.program(tmp_path / name)
            outcome(program, run_dir=run_dir)
            strike = Striker({program.prolong(): factor})
            with ExitStack() as opened:
                if run_dir is None:
                    opened.enter_context(protect(program.model))
                opened.enter_context(program.watched(strike))
                program.train()
            assert set(strike.struck.values()) == {1}
            return state_digest(program.result())

        clean = twice("bare", 1.0)
        assert twice("guarded", INF, run_dir) == clean
        assert len(kinds("rerun")) == 1

    def test_a_run_that_is_killed_and_started_again_ends_with_the_same_bits(
        self, bare: str, run_dir: Path, tmp_path: Path
    ) -> None:
        places = kill_places(self.program)
        lives = live(self.program, run_dir, tmp_path)
        assert [life["ended"] for life in lives] == [-signal.SIGKILL] * len(places) + [0]
        # A snapshot that was in flight when the process died may be lost: one step at most.
        for life, (step, _) in zip(lives[1:], places, strict=True):
            assert step - 1 <= life["resumed"] <= step
        assert lives[-1]["digest"] == bare


def _stop(program: Program, place: Place) -> None:
    assert is_protected(program.model)
    if place[0] == 2:
        raise Stop


def _sources(adapter: ModuleType) -> list[str]:
    """The source of an adapter: a module, or the modules of a package."""
    file = Path(inspect.getfile(adapter))
    files = file.parent.glob("*.py") if hasattr(adapter, "__path__") else [file]
    return [each.read_text() for each in files]


def forked(function: Callable[[], object]) -> int:
    """Call a function in a fork of this process, which has imported the framework already.

    No thread of this process uses torch: it has one thread for products, and no process group.

    Returns:
        The process id. The process exits with 1, and prints why, if the function raises.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    pid = os.fork()
    if pid:
        return pid
    ended = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FORK_S)
        function()
        ended = 0
    except BaseException:  # nothing of the tests may go on in this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)


def live(program: type[Program], run_dir: Path, folder: Path) -> list[dict[str, Any]]:
    """Run until the end, with a kill at each place; return what is known of each life."""
    lives = []
    for number, killed_at in enumerate([*kill_places(program), None]):
        known = folder / f"life {number}"
        known.mkdir()
        make = partial(program, folder / "framework")
        pid = forked(partial(_one_life, make, run_dir, known, killed_at))
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        life = {file.name: json.loads(file.read_text()) for file in known.iterdir()}
        lives.append({"ended": ended, "resumed": None, "digest": None} | life)
    return lives


def _one_life(
    make: Callable[[], Program], run_dir: Path, known: Path, killed_at: Place | None
) -> None:
    """Train in this process, which is killed at a place; else write the digest of the result."""

    def on_pass(place: Place) -> None:
        if not (known / "resumed").exists():
            (known / "resumed").write_text(str(place[0]))
        if place == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    (known / "digest").write_text(json.dumps(outcome(make(), on_pass, run_dir=run_dir)))
