"""`mlx-ring bench`: load a server and tell how it does."""
