"""The machine under MLX: devices, memory, and what makes MLX fast on a CPU."""
