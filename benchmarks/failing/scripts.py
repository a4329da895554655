"""Batch scripts as people write them, one for each launcher. `{train}` is the program with its words."""

from __future__ import annotations

HEAD = """#!/bin/bash
#SBATCH --job-name=train
export PATH={bin}:$PATH PYTHONPATH={programs} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
export TRUTH_FILE={truth} SCRATCH_DISK={disk} MEMORY_GROUP={group} LOGS={logs} DS_ACCELERATOR=cpu
export NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export MASTER_ADDR=${{NODES[0]}} MASTER_PORT=$((29500 + SLURM_JOB_ID % 400)) GLOO_SOCKET_IFNAME=eth0
cd {folder}
"""
RAY_HEAD = """export RAY_DISABLE_IMPORT_WARNING=1 RAY_USAGE_STATS_ENABLED=0 RAY_TRAIN_V2_ENABLED=1
export RAY_DEDUP_LOGS={dedup} RAY_CHDIR_TO_TRIAL_DIR=0 RAY_TMPDIR=/tmp/r{short} RAY_AUTH_MODE=disabled
export RAY_memory_monitor_refresh_ms=0
srun --ntasks-per-node=1 bash -c 'mkdir -p $RAY_TMPDIR && mount -t tmpfs none $RAY_TMPDIR'  # nodes share one machine
export HEAD_IP=$(getent hosts $MASTER_ADDR | cut -d' ' -f1)
"""
DETAIL = "export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO\n"
TRAIN = "{programs}/train.py"
TORCHRUN = (
    "srun {srun} --ntasks-per-node=1 torchrun --nnodes $SLURM_NNODES --nproc_per_node {each} --rdzv_id $SLURM_JOB_ID"
    " --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT {more} {train}"
)
TORCHRUN_STATIC = (
    "srun {srun} --ntasks-per-node=1 bash -c 'torchrun --nnodes $SLURM_NNODES --nproc_per_node {each}"
    " --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR --master_port $MASTER_PORT {more} {train}'"
)
ACCELERATE = (
    "srun {srun} --ntasks-per-node=1 bash -c 'accelerate launch --multi_gpu --num_machines $SLURM_NNODES"
    " --num_processes $(({each} * SLURM_NNODES)) --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR"
    " --main_process_port $MASTER_PORT --mixed_precision no --dynamo_backend no {more} {train}'"
)
WORLD = (
    'export WORLD=$(python3 -c "import base64, json, os, sys; print(base64.urlsafe_b64encode(json.dumps('
    '{{n: list(range({each})) for n in sys.argv[1:]}}).encode()).decode())" "${{NODES[@]}}")\n'
)
DEEPSPEED = WORLD + (
    "srun {srun} --ntasks-per-node=1 bash -c 'python3 -u -m deepspeed.launcher.launch --world_info=$WORLD"
    " --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT {more} {train}'"
)
HOSTS = 'for node in "${{NODES[@]}}"; do echo "$node slots={each}"; done > hostfile\n'
DEEPSPEED_NO_SSH = HOSTS + (
    "srun {srun} --ntasks-per-node=1 bash -c 'deepspeed --hostfile hostfile --no_ssh --node_rank $SLURM_NODEID"
    " --master_addr $MASTER_ADDR --master_port $MASTER_PORT {more} {train}'"
)
DEEPSPEED_SLURM = HOSTS + (
    "deepspeed --hostfile hostfile --launcher slurm --no_ssh_check --master_addr $MASTER_ADDR {more} {train}"
)
DEEPSPEED_ONE = HOSTS + (
    "deepspeed --hostfile hostfile --no_ssh_check --master_addr $MASTER_ADDR --master_port $MASTER_PORT {more} {train}"
)
RAY_START = """srun --nodes=1 --ntasks=1 -w "$MASTER_ADDR" ray start --head --node-ip-address="$HEAD_IP" --port=6379 \\
    --num-cpus {each} --object-store-memory 80000000 --include-dashboard false --block &> ray-head.txt &
sleep 8
for node in "${{NODES[@]:1}}"; do
    srun --nodes=1 --ntasks=1 -w "$node" ray start --address "$HEAD_IP:6379" --num-cpus {each} \\
        --object-store-memory 80000000 --block &> "ray-$node.txt" &
done
sleep 8
export RAY_ADDRESS=$HEAD_IP:6379
python3 -u {train}
"""
RAY_LOCAL = "python3 -u {train}"


def srun(words: str, options: str = "-K", before: str = "") -> str:
    return f"{before}srun {options} python3 -u {TRAIN} {words}"


def launched(form: str, words: str, each: int = 2, srun: str = "", more: str = "", before: str = "") -> str:
    """Return what a batch script does that starts a launcher on each node."""
    return before + form.format(train=f"{TRAIN} {words}", each=each, srun=srun, more=more)


def rayed(form: str, program: str, words: str, each: int = 2, dedup: int = 1) -> str:
    """Return what a batch script does that starts Ray."""
    head = RAY_HEAD.format(dedup=dedup, short="{short}")
    return head + form.format(train=f"{{programs}}/{program} {words}", each=each)
