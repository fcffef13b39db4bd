"""Studies of a paper on silent data corruption (SDC) in LLM training on unhealthy devices."""

from holdfast_lab.study.sdc import abft, bf16, drift, finetune, gradients, mitigation, submodules

STUDIES = (
    *(submodules.STUDY, gradients.STUDY, drift.STUDY, finetune.STUDY),
    *(abft.STUDY, bf16.STUDY, mitigation.STUDY),
)
