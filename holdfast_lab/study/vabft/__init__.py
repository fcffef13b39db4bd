"""Studies of the V-ABFT paper, whose thresholds for checksums come from row statistics."""

from holdfast_lab.study.vabft import alarms, detection, emax, real_weights, scaling, tightness

STUDIES = (
    emax.STUDY,
    *tightness.STUDIES,
    *alarms.STUDIES,
    detection.STUDY,
    scaling.STUDY,
    real_weights.STUDY,
)
