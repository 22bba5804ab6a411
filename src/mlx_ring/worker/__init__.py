"""One rank of one stage: the only package that computes with MLX."""
