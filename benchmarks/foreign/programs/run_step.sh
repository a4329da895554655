#!/bin/bash
# Runs a program as a Slurm job of four tasks, and tells by which job to ask: run_step.sh PORT PYTHON PROGRAM...
port=$1
shift
cat > job.sh <<EOF
#!/bin/bash
export MASTER_ADDR=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=$port
srun --ntasks=4 $*
EOF
job=$(sbatch --parsable --nodes=2 --ntasks=4 --ntasks-per-node=2 --output=job.txt --export=ALL job.sh) || exit 1
echo "--jobid $job" > ask.txt
trap 'scancel "$job"; exit 0' TERM
sleep 100000 &
wait
