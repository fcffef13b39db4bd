#!/bin/bash
# A prolog of slurmd: keeps a job's snapshots outside of the job, so that they outlive its steps and
# a requeue to the same node. It ends when no snapshot process was there for IDLE_S seconds, which
# itself ends ten minutes after its last trainer (Snapshots(linger_s=...)).
# slurm.conf: Prolog=/etc/slurm/prolog.d/*  PrologFlags=Alloc
# The memory that it holds is not counted in the job's; leave room for it (RealMemory, MemSpecLimit).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # slurmd gives its prologs none
HOLDFAST=${HOLDFAST:-/opt/holdfast/bin/holdfast}
run_dir=${HOLDFAST_RUN_DIR:-/tmp/holdfast-$SLURM_JOB_ID} # as in train.sbatch
smp=("$HOLDFAST" smp --run-dir "$run_dir" --idle-s "${IDLE_S:-900}")

# For a job that was queued again the second start is refused, as the first process still serves.
if [ -d /run/systemd/system ]; then
    systemd-run --quiet --collect --unit="holdfast-smp-$SLURM_JOB_ID" --uid="$SLURM_JOB_USER" \
        --property=OOMScoreAdjust=-500 "${smp[@]}"
else
    setsid --fork runuser -u "$SLURM_JOB_USER" -- "${smp[@]}" < /dev/null > "${LOGS:-/var/log/holdfast}/smp-$SLURM_JOB_ID.txt" 2>&1
fi
for _ in $(seq "${PATIENCE_S:-20}"); do
    "$HOLDFAST" smp --run-dir "$run_dir" --healthy && break
    sleep 1
done
exit 0 # no reason to lose a node: without it the snapshots live in the job
