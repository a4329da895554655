"""Starts runners on made-up nodes, as srun does: `start_step.py NUM_NODES SLOTS_PER_NODE COMMAND ...`.

Each runner has a session of its own, so that a signal to a session takes a runner and its ranks with it. It also has a
processor and a GPU of its own, by name at least.
"""

import os
import subprocess
import sys


def main() -> int:
    num_nodes, per_node = int(sys.argv[1]), int(sys.argv[2])
    runners, cpus = [], sorted(os.sched_getaffinity(0))
    for slot in range(num_nodes * per_node):
        node, local = divmod(slot, per_node)
        place = {"SLURM_PROCID": str(slot), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": f"n{node}"}
        own = {"CUDA_VISIBLE_DEVICES": str(local)}
        environment = {
            **os.environ,
            **place,
            **own,
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(num_nodes * per_node),
        }
        runners.append(subprocess.Popen(sys.argv[3:], env=environment, start_new_session=True))
        os.sched_setaffinity(runners[-1].pid, {cpus[slot % len(cpus)]})
    return max(abs(runner.wait()) for runner in runners)


sys.exit(main())
