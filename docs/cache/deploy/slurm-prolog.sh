#!/bin/bash
# Slurm Prolog (as root, on every node of the job): a tmpfs for the job, and its daemon as the job's user, outside the job's cgroup.
set -euo pipefail
job="job-${SLURM_JOB_ID}"
root="/run/ckptkit/${job}"
config="/etc/ckptkit/jobs/${SLURM_JOB_UID}.toml"   # everything but job, root and node; written by the user or the site
[ -r "$config" ] || exit 0                           # the user wants no cache

mkdir -p "$root"
mountpoint -q "$root" || mount -t tmpfs -o "size=620g,noswap,mode=0700,uid=${SLURM_JOB_UID}" ckptkit "$root"
{
    echo "job = \"${job}\""
    echo "root = \"${root}\""
    echo "node = \"${SLURMD_NODENAME}\""
    cat "$config"
} > "/run/ckptkit/${job}.toml"

systemd-run --unit="ckptkit-${job}" --uid="$SLURM_JOB_UID" --collect \
    --property=MemoryMax=624G --property=OOMScoreAdjust=500 --property=LimitNOFILE=16384 \
    --property=Restart=on-failure --property=RestartPreventExitStatus=2 --property=TimeoutStopSec=180 \
    ckptkit cache serve --config "/run/ckptkit/${job}.toml"
# Ranks find it: TaskProlog prints lines that become their environment.
# echo "export CKPTKIT_CACHE_SOCKET=/run/ckptkit/job-${SLURM_JOB_ID}/job-${SLURM_JOB_ID}/daemon.sock"
