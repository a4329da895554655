"""bigsci-launch: launch and diagnose 3D-parallel training on Slurm."""

__version__ = "0.2.0"
