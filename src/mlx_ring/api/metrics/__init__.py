"""What `/metrics` tells: numbers for Prometheus, read when they are asked for."""
