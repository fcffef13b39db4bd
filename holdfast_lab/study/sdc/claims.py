"""The claims of the study of silent data corruption about defences, as data."""

from holdfast_lab.study.registry import Published

# sdc.abft: appendix D, which has a figure without numbers. A tenth is our reading of "little".
Values = dict[str, Published]
_FLAGGED = "the bound is loose for some of this node's errors, not for all of them"
_OTHER_ERRORS = "at fp32 the paper's node 14 erred otherwise than in lock-step (appendix D.2)"


def abft_flags(node: int) -> Published:
    """Return the published share of faults, in percent, that equation 6's bound flags."""
    source = "appendix D.2"
    if node == 14:
        return Published(
            None, low=10.0, source=source, otherwise=_OTHER_ERRORS, printed="frequently"
        )
    return Published(
        None, high=10.0, source=source, otherwise=_FLAGGED, printed="little to no errors"
    )


NO_FALSE_FLAG = Published(
    0.0, 0.0, 0.0, "appendix D.4", "a defect of ours: the bound has no false flags at fp32"
)

# sdc.mitigation: section 7 proposes recomputation and measures nothing.
RECOMPUTED = Published(
    1.0, 1.0, 1.0, "section 7", "a defect of ours", "recomputation to reliably detect"
)
