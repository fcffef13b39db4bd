"""Hugging Face transformers: the ``Trainer`` under a Guard, and verified attention of its models.

TRL's trainers that are built on ``Trainer``, such as ``SFTTrainer``, work alike.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from holdfast.integrations.frameworks import require

require("transformers", "5.23")
from transformers import Trainer  # noqa: E402

from holdfast.integrations.transformers.attention import register_attention  # noqa: E402
from holdfast.integrations.transformers.guarded import GuardedTrainer  # noqa: E402
from holdfast.integrations.transformers.refusals import check_trainer  # noqa: E402
from holdfast.snapshot.client.settings import SnapshotOptions  # noqa: E402

__all__ = ["GuardedTrainer", "attach", "register_attention"]

OF_TRL = ("_metrics", "_total_train_tokens")  # what the passes of TRL's trainers change


def attach(
    trainer: Trainer,
    *,
    run_dir: str | PathLike[str] | None = None,
    protect: bool = True,
    snapshots: SnapshotOptions | None = None,
    attributes: Sequence[str] = OF_TRL,
    **guard: Any,
) -> GuardedTrainer:
    """Put the training of a ``Trainer`` under a Guard; call it once, before ``trainer.train()``.

    Each step is verified before the trainer clips and applies it. Steps in doubt are repeated from
    their first micro-step. A snapshot begins when the next step begins, so that logging, evaluation
    and saving belong to it. If the program is killed and started again, ``trainer.train()``
    continues at the newest snapshot; no checkpoint folder is needed.

    Args:
        trainer: A ``transformers.Trainer``, or an object of a class derived from it.
        run_dir: Directory of the snapshots, as in ``Snapshots``.
        protect: Verify the model's products while it is trained, as by ``holdfast.protect``.
        snapshots: Further keywords of ``Snapshots``, for example ``{"persist_dir": "saved"}``.
        attributes: Names of attributes of the trainer that ``compute_loss`` changes, such as sums
            for its logs; names that it does not have are left out. They are saved, and put back
            before a step is repeated. Their values are numbers, strings, lists and dicts.
        **guard: Further keywords of ``Guard``, for example ``audit=0.01``.

    Guarantees: on healthy hardware weights, optimizer, schedule and logs are, bit for bit, those of
    the same trainer under ``holdfast.protect`` alone, also after a kill.

    Not covered: random transforms in the data set draw other numbers after a restart; other side
    effects of ``compute_loss`` happen again when a step is repeated; what callbacks do to weights
    is not done again after a roll-back. ``docs/integrations.md`` says more.

    Raises:
        ConfigError: The trainer's settings cannot be guarded: says which, why, and what to do.
        TypeError: ``Guard`` or ``Snapshots`` has no such keyword; raised by ``trainer.train()``.
    """
    check_trainer(trainer)
    options: SnapshotOptions = {**(snapshots or {}), "run_dir": run_dir}
    guarded = GuardedTrainer(trainer, options, guard, attributes, protects=protect)
    trainer.add_callback(guarded)
    return guarded
