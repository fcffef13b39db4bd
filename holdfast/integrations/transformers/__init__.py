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

    ``docs/integrations.md`` says what is verified, repeated and restored, and when.

    Args:
        trainer: A ``transformers.Trainer``, or an object of a class derived from it.
        attributes: Names of attributes of the trainer that ``compute_loss`` changes, by default
            those of TRL; names that it does not have are left out. They are saved, and put back
            before a step is repeated. Their values are numbers, strings, lists and dicts.
        **settings: ``run_dir``, ``protect`` (by default True) and ``snapshots``, which has further
            keywords of ``Snapshots``; all others are those of ``Guard``, such as ``audit=0.01``.

    Guarantees: on healthy hardware weights, optimizer, schedule and logs are, bit for bit, those of
    the same trainer under ``holdfast.protect`` alone, also after a kill.

    Not covered: random transforms in the data set draw other numbers after a restart; other side
    effects of ``compute_loss`` happen again when a step is repeated; what callbacks do to weights
    is not done again after a roll-back.

    Raises:
        ConfigError: The trainer's settings cannot be guarded: says which, why, and what to do.
        TypeError: ``Guard`` or ``Snapshots`` has no such keyword; raised by ``trainer.train()``.
    """
    guarded = GuardedTrainer(**settings)
    guarded.attach_to(trainer, attributes)
    return guarded
