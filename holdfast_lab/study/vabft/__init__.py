"""Studies of the V-ABFT paper, whose thresholds for checksums come from row statistics."""

from holdfast_lab.study.vabft import (
    alarms,
    cost,
    detection,
    emax,
    factor,
    fp8,
    real_weights,
    scaling,
    tightness,
    trained_models,
)

STUDIES = (
    emax.STUDY,
    fp8.STUDY,
    factor.STUDY,
    cost.STUDY,
    *tightness.STUDIES,
    *alarms.STUDIES,
    detection.STUDY,
    scaling.STUDY,
    real_weights.STUDY,
    trained_models.STUDY,
)
