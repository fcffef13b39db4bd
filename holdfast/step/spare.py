"""Spares (``holdfast spare``): processes beside a run that compute steps of its ranks again.

A spare that waits puts a request into a folder of the run. In a sampled step one rank, drawn at
random, takes it, and writes what the step started from and digests of its result.
"""

import logging
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
from torch import nn
from torch.amp import GradScaler

from holdfast import config, events
from holdfast.abft.thresholds.settings import numeric_settings
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, HoldfastError, UncorrectableFault
from holdfast.json_store import read_document, write_document
from holdfast.replay.accused import WRONG_TO_EVICT
from holdfast.replay.buffers import unwrapped
from holdfast.replay.gradients import Start
from holdfast.replay.majority import is_sampled
from holdfast.replay.passes import Pass, device_of, portable_rng, received_rng
from holdfast.replay.rerun import CHECK, ForwardBackward, MicroStep
from holdfast.replay.shadow import Attempt, Shadow, ShadowReplica
from holdfast.snapshot.client.snapshots import Snapshots

VERDICT = "holdfast spare verdict", 1, "verdict"  # format, schema and key of its JSON file
POLL_S, WAITS = 0.1, 60  # a spare waits 60 times ``config.timeout_s()`` for a step

_logger = logging.getLogger("holdfast.spare")


class SpareReplica(ShadowReplica):
    """A rank's part in audits by spares, of which it counts the steps offered and dropped."""

    def __init__(
        self,
        model: nn.Module,
        settings: Shadow,
        seed: int,
        attempt: Attempt,
        snapshots: Snapshots | None,
        scaler: GradScaler | None,
    ) -> None:
        super().__init__(model, replace(settings, rate=0.0), seed, attempt)
        divided = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        if divided or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise ConfigError("a spare cannot compute a model divided over ranks, or SyncBatchNorm")
        self._folder = config.run_dir(snapshots.run_dir if snapshots else None) / "spare"
        self._scaler, self._device = scaler, device_of(model)
        self.rate, self._named, self._failed = settings.rate, Counter[int](), False
        self._writer, self._request, self.offered, self.dropped = Thread(), Path(), 0, 0
        self._agreed, self._differed = 0, set[int]()  # ranks, since this spare agreed with one

    def begin(self, step: int) -> None:
        """Begin a step; it is due if this rank is to offer it, and a spare waits."""
        self._step, self._own, self._due, rank = step, None, False, config.rank()
        if is_sampled(self.rate, self.seed, step):
            with self._harmless():
                if rank == 0:
                    record_verdicts(self._folder, self._named)
                draw = random.Random(f"{self.seed}/{step}/spare").randrange(config.world_size())
                waiting = [] if self._writer.is_alive() else list(self._folder.glob("request-*"))
                self.dropped += draw == rank and not waiting
                if draw == rank and waiting:
                    waiting[0].unlink()  # from now on it is this rank's
                    self._due, self._request = True, waiting[0]

    def confirmed(
        self, step: MicroStep, loss: torch.Tensor, redo: object, *, faulty: bool = False
    ) -> torch.Tensor:
        """Offer the step if it is due; return its loss."""
        if self._due and self._own is not None and not faulty:
            with self._harmless():
                path = self._request.with_name(self._request.name.replace("request", "offer"))
                content = self._content(step, self._own)
                self._writer = Thread(target=self._write, args=(path, content), daemon=True)
                self._writer.start()
                self.offered += 1
        return loss

    def close(self, *, ended_well: bool) -> None:
        """Wait until the latest offer is written, and tell spares if the run has ended well."""
        if self._writer.is_alive():
            self._writer.join(config.timeout_s())
        if ended_well and config.rank() == 0 and self._folder.is_dir():
            with self._harmless():
                record_verdicts(self._folder, self._named)
                (self._folder / "ended").touch()

    def _content(self, step: MicroStep, own: Pass) -> dict[str, Any]:
        """Return copies of what a spare needs; the last one waits for a device's others."""
        rng, starts = portable_rng(step.start.rng, self._device), own.local.starts
        name, key, *rest = rng["numpy"]
        where = {"host": socket.gethostname(), "device": str(self._device), "rank": config.rank()}
        parameters = unwrapped(self._model).named_parameters()
        return {
            "where": where | {"step": self._step},
            "settings": numeric_settings(self._device),
            "scale": self._scaler.state_dict() if self._scaler is not None else {},
            "digests": own.digests(1),
            "rng": rng | {"numpy": (name, key.tolist(), *rest)},
            "buffers": (starts[0] if starts else step.start).values(),  # as DDP broadcasts them
            "batch": deepcopy(step.batch),
            "parameters": {name: p.detach().to("cpu", copy=True) for name, p in parameters},
        }

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        with self._harmless():
            draft = path.with_name(f"draft-{path.name}")
            torch.save(content | {"digest": state_digest(content)}, draft)
            draft.replace(path)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Say once what fails in the context, and let training go on."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                self._failed = True
                _logger.warning("an audit by a spare was dropped (said once): %r", error)

    def serve(self, forward_backward: ForwardBackward) -> NoReturn:
        """Compute steps until the run has ended, then end the program."""
        name = f"request-{socket.gethostname()}-{os.getpid()}"
        request, ended = self._folder / name, self._folder / "ended"
        try:
            while (offer := self._next(request, ended)) is not None:
                self._audit(offer, self._prepared(offer, forward_backward))
        finally:
            request.unlink(missing_ok=True)
            if ended.exists() and any(self._folder.glob("verdict-*")):  # no rank will record them
                events.open_ledger(self._folder.parent)
                record_verdicts(self._folder, Counter())
                events.close_ledger()
        _logger.info("the run has ended; this spare agreed with %d steps of it", self._agreed)
        raise SystemExit(0)

    def _next(self, request: Path, ended: Path) -> Any:
        """Ask for a step and return what a rank offers; None if the run has ended."""
        offer = request.with_name(request.name.replace("request", "offer"))
        polls = int(config.timeout_s() / POLL_S) + 1
        for poll in range(WAITS * polls):
            if poll % polls == 0:
                request.touch()  # also if the rank that took the one before was killed
            if offer.exists():
                return self._read(offer)
            if ended.exists() and request.exists():
                return None
            time.sleep(POLL_S)
        raise HoldfastError(f"no step was offered in {self._folder}: does the run go on?")

    def _read(self, offer: Path) -> Any:
        try:
            found = torch.load(offer, map_location=self._moved, weights_only=True)
            if found.pop("digest") != state_digest(found):
                raise ValueError("it was changed since a rank wrote it")
        except Exception as error:
            raise ConfigError(f"cannot read the step in {offer}: {error}") from error
        finally:
            offer.unlink(missing_ok=True)
        return found

    def _moved(self, storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(self._device)

    def _audit(self, offer: dict[str, Any], step: MicroStep) -> None:
        where, mine = offer["where"], self._alone(step, keep=False)
        said = f"step {where['step']} of rank {where['rank']} on {where['host']}"
        if mine.digests(1) == tuple(offer["digests"]):
            self._agreed += 1
            self._differed.clear()
            return
        if mine.faulty or mine.digests(1) != self._alone(step, keep=False).digests(1):
            unsure = f"its device errs, or the program is not deterministic ({CHECK})"
            raise UncorrectableFault(f"a spare computed {said} with other bits each time: {unsure}")
        self._differed.add(where["rank"])
        if not self._agreed or len(self._differed) > 1:  # it may be this spare that errs
            _logger.warning("%s differs, and nobody is named, as this spare may be wrong", said)
            return
        _logger.warning("%s is wrong", said)
        path = self._folder / f"verdict-{where['step']}-{where['rank']}"  # rank 0 records it
        write_document(path, *VERDICT, where | {"detail": {"spare": socket.gethostname()}})

    def _prepared(self, offer: dict[str, Any], forward_backward: ForwardBackward) -> MicroStep:
        """Put the rank's parameters in place, if this process computes as the rank does."""
        theirs, values, model = offer["settings"], offer["parameters"], self._model
        torch.set_num_threads(int(theirs.get("threads", torch.get_num_threads())))
        held = dict(unwrapped(model).named_parameters())
        mine = numeric_settings(self._device) | {n: str(p.shape) for n, p in held.items()}
        theirs |= {name: str(value.shape) for name, value in values.items()}
        if other := sorted(mine.items() ^ theirs.items()):
            raise ConfigError(f"a spare needs the ranks' model and settings; they differ: {other}")
        with torch.no_grad():
            for name, value in values.items():
                held[name].copy_(value)
        if self._scaler is not None:
            self._scaler.load_state_dict(offer["scale"])
        start = Start(received_rng(offer["rng"], self._device), offer["buffers"])
        return MicroStep(model, forward_backward, offer["batch"], start)


def record_verdicts(folder: Path, named: Counter[int]) -> None:
    """Record and remove what spares found; ``named`` counts the wrong passes of each rank."""
    for path in sorted(folder.glob("verdict-*")):
        try:
            found = read_document(path, *VERDICT, what="verdict of a spare", again="it is dropped")
        finally:
            path.unlink(missing_ok=True)
        named[found["rank"]] += 1
        events.record(events.EventKind.SHADOW_MISMATCH, detector="spare", **found)
        if named[found["rank"]] == WRONG_TO_EVICT:
            events.record(events.EventKind.EVICT, detector="spare", **found)
