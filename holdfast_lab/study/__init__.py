"""Studies that reproduce tables and figures of papers, in one package for each paper."""

from holdfast_lab.study import attnchecker, dlrm, reft, sdc, vabft
from holdfast_lab.study.published import Published, Verdict
from holdfast_lab.study.registry import Progress, Row, Settings, Study, Unwatched

__all__ = ["REGISTRY", "Progress", "Published", "Row", "Settings", "Study", "Unwatched", "Verdict"]

REGISTRY: dict[str, Study] = {
    study.name: study
    for study in (
        *vabft.STUDIES,
        *attnchecker.STUDIES,
        *sdc.STUDIES,
        *dlrm.STUDIES,
        *reft.STUDIES,
    )
}
