"""How a model is laid over ranks: layers over the tensor-parallel axis, stages over the pipeline-parallel one."""
