"""Checks of what ``torch.distributed`` moves and sums between ranks (``docs/fault_model.md``)."""
