"""Moves the GPU memory of CUDA processes to host memory and back, by the checkpoint API of NVIDIA's driver."""
