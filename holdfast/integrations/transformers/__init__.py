"""Hugging Face transformers: the ``Trainer`` under a Guard, and verified attention of its models.

TRL's trainers that are built on ``Trainer``, such as ``SFTTrainer``, work alike.
"""

from collections.abc import Sequence
from typing import Any

from holdfast.integrations.adapter import require

require("transformers", "5.23")
from transformers import Trainer  # noqa: E402

from holdfast.integrations.transformers.attention import register_attention  # noqa: E402
from holdfast.integrations.transformers.guarded import GuardedTrainer  # noqa: E402

__all__ = ["GuardedTrainer", "attach", "register_attention"]


def attach(
    trainer: Trainer,
    *,
    attributes: Sequence[str] = ("_metrics", "_total_train_tokens"),
    **settings: Any,
) -> GuardedTrainer:
    """Put the training of a ``Trainer`` under a Guard; call it once, before ``trainer.train()``.

    Args:
        trainer: A ``transformers.Trainer``, or an object of a class derived from it.
        attributes: Names of attributes of plain values that ``compute_loss`` changes, by default
            those of TRL. They are saved, and put back before a step is repeated.
        **settings: ``run_dir``, ``protect`` (by default True), ``snapshots`` (a dict of further
            keywords of ``Snapshots``), and keywords of ``Guard``, such as ``audit=0.01``.

    Guarantees: on healthy hardware weights, optimizer, schedule and logs are, bit for bit, those of
    the same trainer under ``holdfast.protect``, also after a kill.

    Not covered: other side effects of ``compute_loss``; what callbacks do to weights.

    Raises:
        ConfigError: The trainer's settings cannot be guarded: says which, why, and what to do.
    """
    return GuardedTrainer(trainer, attributes, **settings)
