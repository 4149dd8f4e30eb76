#!/bin/bash
# Shows what a job file would start on a cluster. It needs no SLURM and starts no training:
#     bash dry_run.sh train_many_nodes.slurm --epochs 10
# The job file runs in bash, with the variables that SLURM would set, and with stand-ins for srun, scontrol and the
# programs of the list below, which are printed with their arguments. The machines are called node-1, node-2, and so on.
# Other commands of the file, such as mkdir, are run.

set -euo pipefail

PROGRAMS="torchrun python python3 accelerate deepspeed mpirun apptainer singularity enroot"
file=${1:?Name a job file.}
shift
bash -n "$file"

asked() {  # the last value of an option in the #SBATCH lines: --nodes=2, --nodes 2, -N 2 or -N2
    local words i value=
    while read -ra words; do
        for ((i = 0; i < ${#words[@]}; i++)); do
            case ${words[i]} in
                "#"*) break ;;
                "--$1="*) value=${words[i]#*=} ;;
                "--$1" | "-${2:--}") value=${words[i + 1]:-} ;;
                "-${2:--}"[0-9]*) value=${words[i]#-?} ;;
            esac
        done
    done < <(sed -n 's/^#SBATCH[[:space:]]*//p' "$file")
    echo "$value"
}

nodes=$(asked nodes N)
nodes=${nodes%%-*}
nodes=${nodes:-1}
tasks=$(asked ntasks-per-node)
all=$(asked ntasks n)
tasks=${tasks:-$(((${all:-$nodes} + nodes - 1) / nodes))}  # on each machine
gpus=$(asked gpus-per-node)
gpus=${gpus:-$(asked gres | sed -nE 's/.*(gpu(:[^:,]+)*).*/\1/p')}
if [ -z "$gpus" ]; then gpus=$(asked gpus-per-task) && gpus=${gpus:+$((${gpus##*:} * tasks))}; fi
if [ -z "$gpus" ]; then gpus=$(asked gpus G) && gpus=${gpus:+$((${gpus##*:} / nodes))}; fi
gpus=${gpus##*:}
cpus=$(asked cpus-per-task c)

export SLURM_JOB_ID=4042 SLURM_NNODES=$nodes SLURM_JOB_NUM_NODES=$nodes SLURM_JOB_NODELIST="node-[1-$nodes]"
export SLURM_NTASKS=$((nodes * tasks)) SLURM_NTASKS_PER_NODE=$tasks SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NAME="${file##*/}" SLURM_NODELIST=$SLURM_JOB_NODELIST SLURMD_NODENAME=node-1
if [ -n "$cpus" ]; then export SLURM_CPUS_PER_TASK=$cpus; fi
if [ "${gpus:-0}" != 0 ]; then export SLURM_GPUS_ON_NODE=${gpus/gpu/1} SLURM_GPUS_PER_NODE=${gpus/gpu/1}; fi
DRY_RUN=$(mktemp -d)
export DRY_RUN
trap 'rm -r "$DRY_RUN"' EXIT

scontrol() { for ((node = 1; node <= SLURM_JOB_NUM_NODES; node++)); do echo "node-$node"; done; }
module() { :; }
show() {
    printf '   '
    printf ' %s' "$@"
    echo
    printf '%s\n' "$@" >> "$DRY_RUN/words"
}
srun() {  # once per task, on the machines that its options leave
    local nodes=$SLURM_JOB_NUM_NODES tasks= list= node task hosts
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --nodes=* | --ntasks=* | --nodelist=* | --ntasks-per-node=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
            -[Nnwc][!\ ]*) set -- "${1:0:2}" "${1:2}" "${@:2}" ;;
        esac
        case $1 in
            --nodes | -N) nodes=$2 ;;
            --ntasks | -n) tasks=$2 ;;
            --nodelist | -w) list=$2 ;;
            --ntasks-per-node) tasks=$(($2 * nodes)) ;;
        esac
        case $1 in  # those without a value, or with it in the same word
            -[luKvQ] | --*=* | --label | --unbuffered | --exclusive | --overlap | --kill-on-bad-exit | --exact | --pty) shift ;;
            *) shift $(($# > 1 ? 2 : 1)) ;;
        esac
    done
    if [ $# = 0 ]; then echo "srun: no command" && return 1; fi
    IFS=', ' read -ra hosts <<< "${list:-$(scontrol show hostnames | tr '\n' ',')}"
    tasks=${tasks:-$((nodes * SLURM_NTASKS_PER_NODE))}
    for ((node = 0; node < nodes; node++)); do
        echo "${hosts[node]}:"
        for ((task = 0; task < (tasks + nodes - 1) / nodes; task++)); do
            export SLURM_NODEID=$node SLURM_LOCALID=$task SLURM_PROCID=$((node * (tasks / nodes) + task))
            export SLURMD_NODENAME=${hosts[node]}
            if [[ " $PROGRAMS bash sh env " == *" ${1##*/} "* ]]; then "${1##*/}" "${@:2}"; else show "$@"; fi
        done
    done
}
for program in $PROGRAMS; do eval "$program() { show $program \"\$@\"; }"; done
# shellcheck disable=SC2086
export -f scontrol srun module show $PROGRAMS
export PROGRAMS

array=$(asked array a)  # such as 0-3%2 or 1,4,7
if [ -z "$array" ]; then
    bash "$file" "$@"
else
    export SLURM_ARRAY_JOB_ID=$SLURM_JOB_ID SLURM_ARRAY_TASK_ID
    for range in $(tr ',' ' ' <<< "${array%\%*}"); do
        IFS='-:' read -r first last step <<< "$range"
        for ((SLURM_ARRAY_TASK_ID = first; SLURM_ARRAY_TASK_ID <= ${last:-first}; SLURM_ARRAY_TASK_ID += ${step:-1})); do
            echo "task $SLURM_ARRAY_TASK_ID"
            bash "$file" "$@"
        done
    done
fi

exec >&2  # What follows is about the dry run.
echo
if [ ! -e "$DRY_RUN/words" ]; then
    echo "Nothing was started: the file calls neither srun nor one of $PROGRAMS."
    exit 1
fi
for name in $(grep -v '^#' "$file" | grep -oE 'SLURM_[A-Z_]+' | sort -u); do
    if [ -z "${!name+set}" ]; then echo "Look: the file uses $name, which this dry run does not set for what the file asks."; fi
done
for word in $(grep -E '\.py$' "$DRY_RUN/words" | sort -u); do
    if [ ! -e "$word" ]; then echo "Look: $word is not here. Call sbatch from the folder where it is."; fi
done
echo "Checked: the syntax, the commands above, and the names of variables and programs."
echo "Not checked: modules, paths and the network of the cluster, and whether it grants $nodes x ${SLURM_GPUS_ON_NODE:-no} GPUs."
