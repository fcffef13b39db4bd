"""A callback for ``Trainer`` of Lightning (``lightning`` and ``pytorch_lightning``)."""

from holdfast.integrations.frameworks import require

require("lightning", "2.6")

from holdfast.integrations.lightning.callback import HoldfastCallback  # noqa: E402

__all__ = ["HoldfastCallback"]
