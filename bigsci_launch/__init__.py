"""bigsci-launch: launch and diagnose 3D-parallel training on Slurm."""

__version__ = "0.1.0"
