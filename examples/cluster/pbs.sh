#!/bin/bash
# Trains on a PBS cluster (OpenPBS, PBS Professional, Torque): mpirun with a hostfile made of what
# PBS has allocated. Ranks are started by ssh, which must log in without a password.
#
#     qsub -v ARGUMENTS="--model mobilenetv2 --epochs 90" examples/cluster/pbs.sh
#
# Ten minutes before its time limit the job saves a checkpoint and ends. Submit it again with
# RUN_DIR to resume: qsub -v RUN_DIR=runs/kaitian-123,ARGUMENTS="..." examples/cluster/pbs.sh
#
# Unlike nodes are chunks with a plus between them: one with 4 GPUs and two with 2 MLUs each would be
#     -l select=1:ncpus=8:mpiprocs=4:ngpus=4+2:ncpus=4:mpiprocs=2:nmlus=2
# where ngpus and nmlus are your cluster's names. mpiprocs is the number of ranks on a node.
#
#PBS -N kaitian
#PBS -l select=2:ncpus=8:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=04:00:00
#PBS -r y
#PBS -j oe
limit=230m last=238m # less than walltime: PBS leaves a few seconds between SIGTERM and SIGKILL

cd "$PBS_O_WORKDIR" || exit 2
run=${RUN_DIR:-runs/kaitian-${PBS_JOBID%%.*}}
read -ra arguments <<< "${ARGUMENTS:-}"

# PBS lists a node once for each of its ranks. A node on a single line would get a rank per core.
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
awk '!slots[$1]++ { names[++n] = $1 } END { for (i = 1; i <= n; i++) print names[i], "slots=" slots[names[i]] }' \
    "$PBS_NODEFILE" > "$hosts"

# At qdel, PBS sends SIGTERM to mpirun as well. Only stay until the checkpoint is saved.
trap : TERM

# At the first limit the ranks save between two steps and end; SIGTERM saves the last one, if whole.
timeout --foreground --signal=TERM "$last" timeout --foreground --signal=USR2 "$limit" \
    mpirun --hostfile "$hosts" --with-ft ulfm --bind-to none -x PATH \
    kaitian-train --run-dir "$run" --resume auto "${arguments[@]}" &
job=$!
# A trap interrupts `wait`.
while wait "$job"; code=$?; kill -0 "$job" 2> /dev/null; do :; done
# mpirun does not wait for the process that saves the last step; PBS kills what this script leaves.
while pgrep -u "$UID" -x kaitian-save > /dev/null; do sleep 1; done
exit "$code"
