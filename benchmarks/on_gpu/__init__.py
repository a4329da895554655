"""The phases of `benchmarks/gpu_session.sh`: what one card shows of `bsl` in ten minutes."""
