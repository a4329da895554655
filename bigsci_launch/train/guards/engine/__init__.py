"""The guards of `bsl train`: DeepSpeed's engine, its partitions and schedule, fitted to the checks of the library."""
