"""A tiny training run by torchtitan's Trainer, on a CPU: one rank, FSDP2 over gloo.

torchtitan knows accelerators only. What it asks an accelerator for is answered here, and torch
2.13 lacks ``torch.distributed.set_timeout``, which it calls after the first step.
"""

import gc
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as tools
from contract import Program
from torch import distributed, nn
from torch.utils.data import IterableDataset


class Cpu:
    """What torchtitan asks of ``torch.cuda``."""

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=2**30))
    memory_stats = staticmethod(lambda device=None: {})
    empty_cache = reset_peak_memory_stats = synchronize = staticmethod(lambda: None)


tools.device_type, tools.device_module = "cpu", Cpu

import torchtitan.trainer  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import BaseValidator  # noqa: E402
from torchtitan.config import DebugConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.model import Llama3Model  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

from holdfast.integrations.torchtitan import attach  # noqa: E402

WORDS, LENGTH, WIDTH, HEADS = 64, 16, 32, 2


class Texts(IterableDataset[Any]):
    """Sequences of random tokens, sixteen a pass, shuffled, without end; says where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            number, self.position = self.position, self.position + 1
            order = torch.randperm(16, generator=torch.Generator().manual_seed(number // 16))
            draw = torch.Generator().manual_seed(int(order[number % 16]))
            tokens = torch.randint(0, WORDS, (LENGTH + 1,), generator=draw)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""
        self.position = state["position"]


class Loader(ParallelAwareDataloader):
    """Batches of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to set."""

    def __init__(self, config: Any, *, local_batch_size: int, **_: Any) -> None:
        super().__init__(Texts(), 0, 1, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):
    """None is needed."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None  # type: ignore[assignment]


Tokenizer.__abstractmethods__ = frozenset()


class Evaluation(BaseValidator):
    """One batch of one sequence, after the third step and every third one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseValidator.Config):
        """When."""

        enable: bool = True
        freq: int = 3

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Run the model."""
        model_parts[0].eval()
        with torch.no_grad():
            model_parts[0](torch.arange(LENGTH)[None])
        model_parts[0].train()

    def should_validate(self, step: int) -> bool:
        """Not after the first step, unlike torchtitan's own."""
        return step % self.config.freq == 0


def model_config() -> Any:
    """Two blocks of Llama 3 with torch's attention, as torchtitan's tests for its graph trainer."""
    drawn = {"weight": lambda tensor: nn.init.normal_(tensor, std=0.1)}
    ones = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=64, theta=10000, scaling="none")
    layers = _build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=HEADS, hidden_dim=2 * WIDTH, rope=rope, attn_backend="varlen"
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=WIDTH, param_init=drawn
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=ones),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=drawn),
        layers=layers,
    )


def trainer_config(folder: Path, steps: int, accumulation: int) -> Any:
    """The configuration of a run."""
    spec = ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model_config(),
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    optimizer = default_adamw(lr=1e-2)
    optimizer.implementation = "foreach"
    return torchtitan.trainer.Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        model_spec=spec,
        dump_folder=str(folder),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=2 * accumulation,
            seq_len=LENGTH,
            steps=steps,
            max_norm=0.5,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Evaluation.Config(),
        debug=DebugConfig(seed=5),
        activation_checkpoint=None,
    )


class TorchtitanProgram(Program):
    """Three micro-batches a step; passes over the data end within a step."""

    def __init__(self, folder: Path) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        local = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(local, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        logging.getLogger().setLevel(logging.ERROR)
        torch.manual_seed(5)
        config = trainer_config(folder, self.steps, self.accumulation)
        self.trainer = config.build()
        gc.enable()  # torchtitan switches it off
        torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None
        now = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
        torchtitan.trainer.time = now
        self.logs: dict[int, tuple[float, float, float]] = {}
        self.trainer.metrics_processor.log = self._log
        [self.model] = self.trainer.model_parts
        self.struck, self.weight = self.model.norm, self.model.norm.weight

    def _log(self, step: int, *values: float, extra_metrics: dict[str, Any]) -> None:
        self.logs[step] = values[:3]

    def attach(self, run_dir: Path | None, **settings: Any) -> None:
        attach(self.trainer, run_dir=run_dir, **settings)

    def train(self) -> None:
        self.trainer.train()

    def steps_done(self) -> int:
        return int(self.trainer.lr_schedulers.state_dict()["last_epoch"])

    def result(self) -> dict[str, Any]:
        states = (self.model, self.trainer.optimizers, self.trainer.lr_schedulers, self.trainer)
        parts = [each.state_dict() for each in states]
        local = [
            {
                name: value.to_local() if hasattr(value, "to_local") else value
                for name, value in part.items()
            }
            for part in parts
        ]
        return {"state": local, "log": self.logs[self.steps], "random": torch.get_rng_state()}

    def internals(self) -> list[tuple[object, str]]:
        return []
