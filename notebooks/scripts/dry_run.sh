#!/bin/bash
# Shows what a job file would start on a cluster. It needs no SLURM and starts no training:
#     bash dry_run.sh train_many_nodes.slurm --epochs 10
# The job file runs in bash, with the variables that SLURM would set, and with stand-ins for srun and scontrol. Programs
# are printed with their arguments instead of being started. The machines are called node-1, node-2, and so on.

set -euo pipefail

file=$1
shift
asked() { sed -n "s/^#SBATCH --$1=\([^ ]*\).*/\1/p" "$file"; }  # what the job file asks for

export SLURM_JOB_ID=4042 SLURM_NNODES SLURM_GPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_JOB_NODELIST
SLURM_NNODES=$(asked nodes)
SLURM_GPUS_ON_NODE=$(asked gpus-per-node)
SLURM_CPUS_PER_TASK=$(asked cpus-per-task)
SLURM_JOB_NODELIST="node-[1-$SLURM_NNODES]"

scontrol() { for ((node = 1; node <= SLURM_NNODES; node++)); do echo "node-$node"; done; }
srun() {  # once per machine
    for host in $(scontrol show hostnames); do
        echo "$host:"
        "$@"
    done
}
torchrun() { printf '   '; printf ' %s' torchrun "$@"; echo; }
python() { printf '   '; printf ' %s' python "$@"; echo; }
export -f scontrol srun torchrun python

tasks=$(asked array)               # such as 0-3%2
if [ -z "$tasks" ]; then
    bash "$file" "$@"
else
    export SLURM_ARRAY_JOB_ID=$SLURM_JOB_ID SLURM_ARRAY_TASK_ID
    range=${tasks%\%*}
    for ((SLURM_ARRAY_TASK_ID = ${range%-*}; SLURM_ARRAY_TASK_ID <= ${range#*-}; SLURM_ARRAY_TASK_ID++)); do
        echo "task $SLURM_ARRAY_TASK_ID"
        bash "$file" "$@"
    done
fi
