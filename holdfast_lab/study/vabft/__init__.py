"""V-ABFT: thresholds from row statistics, beside the other published ones and ours."""

from holdfast_lab.study.vabft import alarms, detection, emax, real_weights, scaling, tightness

STUDIES = (
    emax.STUDY,
    *tightness.STUDIES,
    *alarms.STUDIES,
    detection.STUDY,
    scaling.STUDY,
    real_weights.STUDY,
)
