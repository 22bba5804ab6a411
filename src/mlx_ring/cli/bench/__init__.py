"""`mlx-ring bench`: send load to a server and measure latency and throughput."""
