"""Basics that every process shares: types, errors, logs, traces."""
