#!/usr/bin/env bash
# Asynchronous training under Slurm: one torchrun per node, checkpoint and requeue before the time limit; docs/slurm.md.
#     sbatch [--nodes N --gpus-per-node M ...] launch/slurm_async.sh CONFIG [--roles R=N,...] [section.key=value ...]
#SBATCH --job-name=flashflow
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@180
#
# FLASHFLOW_PYTHON        interpreter on every node: .venv/bin/python of the submission folder, else python3
# FLASHFLOW_OVERRIDES     more overrides, before those of the command line
# FLASHFLOW_START         --continue (default), --resume or --overwrite
# FLASHFLOW_PORT          of torchrun's rendezvous on the first node
# FLASHFLOW_MAX_RESTARTS  times that torchrun starts all slots again within one job (3)
# FLASHFLOW_SRUN          more options of srun
set -uo pipefail

if [ $# -lt 1 ]; then
  echo "usage: sbatch [options] ${BASH_SOURCE[0]##*/} CONFIG [--roles R=N,...] [section.key=value ...]" >&2
  exit 2
fi
config=$1
shift

submitted=${SLURM_SUBMIT_DIR:-$PWD}
python=${FLASHFLOW_PYTHON:-python3}
[ -z "${FLASHFLOW_PYTHON:-}" ] && [ -x "$submitted/.venv/bin/python" ] && python=$submitted/.venv/bin/python

# sbatch runs a copy of this file: main.py lies beside the original, or flashflow is installed.
original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
main=("$(dirname "$original")/main.py")
if [ -f "${main[0]}" ]; then
  root=$(cd "$(dirname "${main[0]}")/.." && pwd)
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
else
  main=(--module flashflow.launch.slot)
fi

# The nodes of all components of a heterogeneous job, and how scancel names their steps.
components=${SLURM_HET_SIZE:-1} nodes=0 counts=() targets=()
for ((group = 0; group < components; group++)); do
  count=SLURM_JOB_NUM_NODES id=SLURM_JOB_ID list=SLURM_JOB_NODELIST
  [ -n "${SLURM_HET_SIZE:-}" ] && count+=_HET_GROUP_$group id+=_HET_GROUP_$group list=SLURM_JOB_NODELIST_HET_GROUP_0
  counts+=("${!count}") targets+=("${!id}.0") nodes=$((nodes + ${!count}))
done
first=$(scontrol show hostnames "${!list}" | head -n 1)
address=$(scontrol -o show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
port=${FLASHFLOW_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

start=${FLASHFLOW_START:---continue}
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && start=--continue # what was begun is not begun again
requeue=no
on_usr1() { # Slurm says that the time is nearly up
  requeue=yes
  echo "slurm: $(date +%T) time is nearly up: writing a checkpoint, then requeueing"
  end_step
}
end_step() { # not by srun, which would kill the tasks; and it must mean nothing to all but flashflow.launch.agent
  for target in "${targets[@]}"; do scancel --signal=URG "$target" 2> /dev/null; done
}
trap on_usr1 USR1
trap end_step TERM

echo "slurm: $(date +%T) job $SLURM_JOB_ID on $nodes node(s), restart ${SLURM_RESTART_COUNT:-0}, rendezvous $address:$port"
# Ranks of torchrun do not matter: the plan goes by the names of the hosts. is_host, for c10d would guess by host name.
# shellcheck disable=SC2016,SC2206
task=(
  bash -c 'exec "$1" -m flashflow.launch.agent --rdzv-conf \
    "join_timeout=300,read_timeout=60,is_host=$([ "$SLURMD_NODENAME" = "$0" ] && echo 1 || echo 0)" "${@:2}"' "$first"
  "$python" --nnodes="$nodes" --nproc-per-node=1 --max-restarts="${FLASHFLOW_MAX_RESTARTS:-3}" --monitor-interval=0.5
  --shutdown-timeout=150 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
  --rdzv-endpoint="$address:$port" "${main[@]}" --config "$config" "$start" ${FLASHFLOW_OVERRIDES:-} "$@"
)
command=()
for ((group = 0; group < components; group++)); do
  [ "$group" -gt 0 ] && command+=(:)
  [ -n "${SLURM_HET_SIZE:-}" ] && command+=(--het-group="$group")
  # shellcheck disable=SC2206
  command+=(--nodes="${counts[group]}" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none ${FLASHFLOW_SRUN:-} "${task[@]}")
done
srun "${command[@]}" &
step=$!
while :; do # a trapped signal ends wait, not the step
  wait "$step"
  code=$?
  kill -0 "$step" 2> /dev/null || break
done
echo "slurm: $(date +%T) the step ended with $code"
[ "$requeue" = yes ] && [ "$code" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
