"""Evidence that other tools wrote: text of `py-spy dump`, torch's flight recorder, NCCL's RAS. Into the same bundle."""
