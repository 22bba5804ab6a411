"""Metrics for Prometheus, computed when `/metrics` is requested."""
