#!/bin/bash
#SBATCH --job-name=warpsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# A job of many hosts under Slurm: sbatch examples/slurm.sh --steps 80
#
# srun starts one process for each GPU, and warpsmith.distributed.init() reads its place from Slurm. When a rank dies, srun
# ends the others and all start again from the newest checkpoint, up to RESTARTS times in this allocation. A job that is
# requeued goes on from there too. The folder of the checkpoints must be one that all hosts see.
set -uo pipefail
script=${SCRIPT:-examples/zero.py}
out=${OUT:-runs/slurm-$SLURM_JOB_ID}
for attempt in $(seq 0 "${RESTARTS:-3}"); do
  [ "$attempt" = 0 ] || echo "slurm.sh: restart $attempt"
  srun --kill-on-bad-exit=1 python "$script" --out "$out" "$@" && exit 0
done
echo "slurm.sh: given up after ${RESTARTS:-3} restarts" >&2
exit 1
