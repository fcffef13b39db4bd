"""Holdfast and its peers behind one interface: what ``bench.snapshot_peers`` measures."""

import copy
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.launch import stop_smp

RUN_DIR = "run"
SAVER_PID = "saver.pid"
SAVER = (
    "from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver as Saver; "
    "import time; Saver.start_async_saving_ckpt(); time.sleep(3600)"
)
PATIENCE_S = 600.0


class Candidate:
    """One way to save what a training step may change.

    Args:
        model, optimizer: what is saved.
        folder: where it may write.
    """

    package: ClassVar[str] = "torch"
    copies: ClassVar[float]  # of the state that it holds besides the training
    on_disk: ClassVar[bool] = True
    outlives_the_trainer: ClassVar[bool] = True
    written_last: ClassVar[str] = ""  # the file of a save that completes it

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def begin(self, step: int) -> None:
        """Start to save; if an earlier save must be done first, wait for it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until ``optimizer.step`` may change what is being saved."""

    def settle(self) -> None:
        """Wait until all that was begun is as safe as it gets."""

    def restore(self) -> bool:
        """Load the newest save into model and optimizer; False if there is none."""
        raise NotImplementedError

    def close(self) -> None:
        """End what was started."""

    def state(self) -> dict[str, Any]:
        """What is saved, by reference."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Put a saved state into the live objects."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def place(self, step: int) -> Path:
        """One of two places in turn, so that a whole save is always there."""
        return self.folder / f"save-{step % 2}"

    def newest(self) -> Path | None:
        """The place that was written last."""
        last = self.written_last
        found = [place for place in (self.place(0), self.place(1)) if (place / last).exists()]
        return max(found, key=lambda place: (place / last).stat().st_mtime_ns, default=None)


class Holdfast(Candidate):
    """Snapshots in the SMP's memory, with digests; the default ``keep``."""

    package = "torch-holdfast"
    copies = 3.0
    on_disk = False
    persist: ClassVar[dict[str, Any]] = {}
    keep = 2

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        where = {"persist_dir": folder / "disk"} if self.persist else {}
        options = {"run_dir": folder / RUN_DIR, "keep": self.keep, **self.persist, **where}
        # The phases have different arguments, and one restores what another has saved.
        self.snapshots = Snapshots(model, optimizer, run_id="bench", **options)

    def begin(self, step: int) -> None:
        self.snapshots.begin(step)

    def finish(self) -> None:
        self.snapshots.finish()

    def settle(self) -> None:
        self.snapshots.wait_committed()

    def restore(self) -> bool:
        return self.snapshots.restore() is not None

    def close(self) -> None:
        self.snapshots.close(finished=True)


class HoldfastDisk(Holdfast):
    """The same, and every snapshot that the persister can keep up with goes to disk."""

    on_disk = True
    persist: ClassVar[dict[str, Any]] = {"persist_every": 1}
    keep = 1

    def settle(self) -> None:
        if self.snapshots.wait_committed() is not None:
            self.snapshots.persist()


class LmResiliency(Candidate):
    """GEMINI's copy in the trainer's own memory; the peer's replica needs a second node."""

    package = "lm-resiliency"
    copies = 2.0
    on_disk = False
    outlives_the_trainer = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        config = InMemoryCkptConfig(
            interval=1,
            disk_flush_interval=0,
            disk_folder=str(folder),
            run_id="bench",
            pin_memory=False,
        )
        # Two slots; without this it makes two more for the replica that one rank does not have.
        alone = SimpleNamespace(has_natural_replicas=True)
        self.manager = InMemoryCheckpointManager(config, parallelism_info=alone)

    def begin(self, step: int) -> None:
        self.manager.save(self.state(), step)

    def finish(self) -> None:
        self.manager.maybe_wait()

    def restore(self) -> bool:
        found = self.manager.load("latest")
        if found is not None:
            self.load(found[0])
        return found is not None

    def close(self) -> None:
        self.manager.close()


def form_group_alone() -> None:
    """Form the process group that a candidate asks for, of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


class Dcp(Candidate):
    """``torch.distributed.checkpoint.async_save`` with its defaults: staged at once, then written.

    The upload runs in a thread; of one rank, so without collectives.
    """

    copies = 2.0
    written_last = ".metadata"
    process = staged = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kinds = AsyncCheckpointerType
        self.dcp, self.kind = dcp, kinds.PROCESS if self.process else kinds.THREAD
        self.upload: Future[Any] | None = None
        self.staging: Future[None] | None = None
        self.stager = DefaultStager(StagingOptions(False, False, True, False))
        if self.process:
            # The process that writes meets the trainer there.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            form_group_alone()

    def begin(self, step: int) -> None:
        self.settle()
        begun = self.dcp.async_save(
            self.state(),
            checkpoint_id=self.place(step),
            async_checkpointer_type=self.kind,
            async_stager=self.stager if self.staged else None,
            no_dist=not self.process,
        )
        if self.staged:
            self.staging, self.upload = begun.staging_completion, begun.upload_completion
        else:
            self.upload = begun

    def finish(self) -> None:
        if self.staging is not None:
            self.staging.result(PATIENCE_S)

    def settle(self) -> None:
        if self.upload is not None:
            self.upload.result(PATIENCE_S)

    def restore(self) -> bool:
        place = self.newest()
        if place is not None:
            state = self.state()
            self.dcp.load(state, checkpoint_id=place, no_dist=not self.process)
            self.load(state)
        return place is not None

    def close(self) -> None:
        self.settle()
        self.stager.close()
        if self.process:
            torch.distributed.destroy_process_group()


class DcpStaged(Dcp):
    """The same with one stager for all saves, which stages during the next forward and backward."""

    copies = 1.0
    staged = True


class DcpProcess(Dcp):
    """The same as ``Dcp``, written by a process of its own."""

    copies = 3.0
    process = True


class TorchSnapshot(Candidate):
    """``torchsnapshot.Snapshot.async_take``."""

    package = "torchsnapshot"
    copies = 1.0
    written_last = ".snapshot_metadata"

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        import torchsnapshot

        self.snapshot, self.pending = torchsnapshot.Snapshot, None
        self.parts = {"model": model, "optimizer": optimizer}

    def begin(self, step: int) -> None:
        self.settle()
        self.pending = self.snapshot.async_take(str(self.place(step)), self.parts)

    def settle(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def restore(self) -> bool:
        place = self.newest()
        if place is not None:
            self.snapshot(str(place)).restore(self.parts)
        return place is not None

    close = settle


class CheckFreq(Candidate):
    """CheckFreq's two phases: a copy in memory beside the computation, then ``torch.save``.

    The next copy waits until the last one is on disk, as there is one buffer. Ours, after the
    paper (Mohan et al., FAST 2021); its own code is of PyTorch 1.
    """

    copies = 1.0

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self.worker = ThreadPoolExecutor(1)
        self.buffers: dict[str, torch.Tensor] = {}
        self.copying: Future[Any] | None = None
        self.writing: Future[None] | None = None

    def begin(self, step: int) -> None:
        self.settle()
        self.copying = self.worker.submit(self._copy, self.state(), "")
        self.writing = self.worker.submit(self._write, self.copying, self.place(step))

    def _copy(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, f"{path}.{key}") for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if path not in self.buffers:
            self.buffers[path] = torch.empty_like(value)
        return self.buffers[path].copy_(value.detach())

    @staticmethod
    def _write(copying: "Future[Any]", place: Path) -> None:
        draft = place.with_suffix(".draft")
        with open(draft, "wb") as file:
            torch.save(copying.result(), file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(place)

    def finish(self) -> None:
        if self.copying is not None:
            self.copying.result(PATIENCE_S)

    def settle(self) -> None:
        if self.writing is not None:
            self.writing.result(PATIENCE_S)

    def restore(self) -> bool:
        return _loaded(self)

    def close(self) -> None:
        self.settle()
        self.worker.shutdown()


class TorchSave(Candidate):
    """``torch.save`` while training waits."""

    copies = 0.0

    def begin(self, step: int) -> None:
        draft = self.place(step).with_suffix(".draft")
        torch.save(self.state(), draft)
        draft.rename(self.place(step))

    def restore(self) -> bool:
        return _loaded(self)


class Nvrx(Candidate):
    """NVRx's ``LocalCheckpointManager`` without replicas, while training waits.

    Its asynchronous save calls ``torch.cuda.synchronize``, so that it cannot be measured on CPU.
    """

    package = "nvidia-resiliency-ext"
    copies = 0.0

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

        from bench.snapshot_nvrx import HostState

        form_group_alone()
        self.wrapped, self.manager = HostState, local_manager.LocalCheckpointManager(folder)

    def begin(self, step: int) -> None:
        self.manager.save(self.wrapped(self.state()), step, is_async=False)

    def restore(self) -> bool:
        found = self.manager.find_latest() != -1
        if found:
            self.load(self.manager.load()[0].state_dict)
        return found

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DlroverMemory(Candidate):
    """DLRover's flash checkpoint into shared memory, copied while training waits.

    Its saver, which holds what describes the memory, runs in a process of its own that outlives the
    trainer, as under ``dlrover-run``.
    """

    package = "dlrover"
    copies = 1.0
    on_disk = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        os.environ |= {"TORCHELASTIC_RUN_ID": folder.name, "ROLE_NAME": "dlrover-trainer"}
        from dlrover.python.common.storage import get_checkpoint_storage
        from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine

        if not (folder / SAVER_PID).exists():
            words = [sys.executable, "-W", "ignore", "-c", SAVER]
            saver = subprocess.Popen(words, start_new_session=True)
            (folder / SAVER_PID).write_text(str(saver.pid))
        self.engine = FullCheckpointEngine(str(folder), get_checkpoint_storage(None))

    def begin(self, step: int) -> None:
        paths = {"state": str(self.place(step))}
        if not self.engine.save_to_memory(step, {"state": self.state()}, paths):
            raise RuntimeError(f"DLRover skipped step {step}")

    def restore(self) -> bool:
        found = self.engine.load()
        if found:  # the tensors are DLRover's memory, and the optimizer would keep them
            self.load(copy.deepcopy(found))
        return bool(found)


def _loaded(candidate: Candidate) -> bool:
    place = candidate.newest()
    if place is not None:
        candidate.load(torch.load(place, weights_only=True))
    return place is not None


CANDIDATES: dict[str, type[Candidate]] = {
    "holdfast": Holdfast,
    "holdfast-disk": HoldfastDisk,
    "lm-resiliency": LmResiliency,
    "dcp-thread": Dcp,
    "dcp-staged": DcpStaged,
    "dcp-process": DcpProcess,
    "torchsnapshot": TorchSnapshot,
    "checkfreq": CheckFreq,
    "torch.save": TorchSave,
    "nvrx": Nvrx,
    "dlrover": DlroverMemory,
}


def clean_up(folder: Path) -> None:
    """Stop the SMP or saver that a killed trainer left, and remove what was written."""
    stop_smp(folder / RUN_DIR)
    if (folder / SAVER_PID).exists():
        with suppress(ProcessLookupError):
            os.killpg(int((folder / SAVER_PID).read_text()), signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"{folder.name}_*"):
            path.unlink()
        shutil.rmtree(Path("/tmp/ckpt_sock") / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
