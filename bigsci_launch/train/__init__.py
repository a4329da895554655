"""The Megatron-DeepSpeed-style trainer. The only package that imports torch and deepspeed at module top."""
