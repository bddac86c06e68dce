#!/usr/bin/env bash
# Synchronous training under Slurm, to compare with: slurm_async.sh with rollout.alpha=0 and weights.sync=blocking.
#     sbatch [--nodes N --gpus-per-node M ...] launch/slurm_sync.sh CONFIG [--roles R=N,...] [section.key=value ...]
#SBATCH --job-name=flashflow-sync
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@180
set -euo pipefail

# sbatch runs a copy of this file: slurm_async.sh lies beside the original.
original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
export FLASHFLOW_OVERRIDES="rollout.alpha=0 weights.sync=blocking ${FLASHFLOW_OVERRIDES:-}"
exec bash "$(dirname "$original")/slurm_async.sh" "$@"
