"""Decode steps for GLM-5.x and DeepSeek-V3 over the kernels of serve/engine/kernels, captured as CUDA graphs."""
