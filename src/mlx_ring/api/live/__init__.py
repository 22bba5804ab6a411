"""How the cluster stands, told to whoever watches while they watch."""
