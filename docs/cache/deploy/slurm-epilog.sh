#!/bin/bash
# Slurm Epilog (as root, on every node of the job): drain what is newest, end the daemon, give the memory back.
# EpilogMsgTime and the node's drain time must leave room for TimeoutStopSec of the unit.
set -uo pipefail
job="job-${SLURM_JOB_ID}"
root="/run/ckptkit/${job}"
systemctl stop "ckptkit-${job}" 2>/dev/null          # SIGTERM; returns when the newest step is durable, or the grace is over
mountpoint -q "$root" && umount "$root"
rm -rf "$root" "/run/ckptkit/${job}.toml"
exit 0
