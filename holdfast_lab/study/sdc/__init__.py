"""Silent data corruption in LLM training: what unhealthy devices do to it, and what finds them."""

from holdfast_lab.study.sdc import abft, drift, finetune, gradients, mitigation, submodules

STUDIES = (
    *(submodules.STUDY, gradients.STUDY, drift.STUDY, finetune.STUDY),
    *(abft.STUDY, mitigation.STUDY),
)
