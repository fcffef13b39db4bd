"""What every adapter to a training framework must do, tested with the real framework.

An adapter's test file writes one ``Program``, a tiny training run by the framework's own trainer,
and a subclass of ``AdapterContract`` that names it::

    class TestTransformers(AdapterContract):
        program = TrainerProgram
        adapter = holdfast.integrations.transformers
"""

import ast
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from holdfast import events, protect
from holdfast.digest.tensors import state_digest

INF, ONE_PERCENT = float("inf"), 1.01
EVALUATION = -1  # in the place of a micro-step's number

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
    def attach(self, run_dir: Path, **settings: Any) -> None:
        """Add the lines that a user of holdfast adds."""

    @abstractmethod
    def train(self) -> None:
        """Run the whole training, or what is left of it."""

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

    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def _small_heap() -> Iterator[None]:
        """Frameworks collect garbage when they begin to train: let it not look at all modules."""
        gc.freeze()
        yield
        gc.unfreeze()

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


def _sources(adapter: ModuleType) -> list[str]:
    """The source of an adapter: a module, or the modules of a package."""
    file = Path(inspect.getfile(adapter))
    files = file.parent.glob("*.py") if hasattr(adapter, "__path__") else [file]
    return [each.read_text() for each in files]


def live(program: type[Program], run_dir: Path, folder: Path) -> list[dict[str, Any]]:
    """Run until the end, with a kill at each place; return what is known of each life.

    One process imports the framework, and each life is a fork of it.
    """
    command = [sys.executable, __file__, inspect.getfile(program), program.__name__]
    root = Path(__file__).parents[2]
    paths = [root, root / "tests", Path(__file__).parent]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [*command, str(run_dir), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in (folder / "lives").read_text().splitlines()]


def _one_life(program: type[Program], run_dir: Path, folder: Path, killed_at: Place | None) -> None:
    """Train in this process, which is killed at a place; else write the digest of the result."""
    run = program(folder / "framework")

    def on_pass(place: Place) -> None:
        if not (folder / "resumed").exists():
            (folder / "resumed").write_text(str(place[0]))
        if place == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    digest = outcome(run, on_pass, run_dir=run_dir)
    (folder / "digest").write_text(digest)


def _main() -> None:
    file, name, *folders = sys.argv[1:]
    run_dir, folder = map(Path, folders)
    module = __import__(Path(file).stem)
    program: type[Program] = getattr(module, name)
    torch.set_num_threads(1)
    gc.freeze()
    for killed_at in [*kill_places(program), None]:
        (folder / "resumed").unlink(missing_ok=True)
        child = os.fork()
        if not child:
            _one_life(program, run_dir, folder, killed_at)
            sys.stdout.flush()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        resumed, digest = folder / "resumed", folder / "digest"
        life = {
            "ended": ended,
            "resumed": int(resumed.read_text()) if resumed.exists() else None,
            "digest": digest.read_text() if digest.exists() else None,
        }
        with (folder / "lives").open("a") as lives:
            lives.write(json.dumps(life) + "\n")


if __name__ == "__main__":
    _main()
