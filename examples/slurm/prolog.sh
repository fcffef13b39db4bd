#!/bin/bash
# A prolog of slurmd: screens the node before each job, and drains it if it is suspect.
# slurm.conf: Prolog=/etc/slurm/prolog.d/*  PrologFlags=Alloc  BatchStartTimeout=120
export XDG_CACHE_HOME=/var/cache/holdfast HOLDFAST_TIMEOUT_S=30
HOLDFAST=${HOLDFAST:-/opt/holdfast/bin/holdfast}
LOGS=${LOGS:-/var/log/holdfast}

"$HOLDFAST" screen --for "${SCREEN_FOR:-30s}" --units "$(nproc)" --stop-at-first \
    --json "$LOGS/screen-$SLURM_JOB_ID.json" > "$LOGS/screen-$SLURM_JOB_ID.txt" 2>&1
case $? in
    1) scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="holdfast: suspect"
       exit 1 ;;
    *) exit 0 ;;  # healthy; or unable, or misconfigured: no reason to lose a node, look at the log
esac
