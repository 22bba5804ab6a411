"""`mlx-ring doctor`: what is wrong with a machine or its network, and what to do about it."""
