"""The machine that a process runs on: addresses, interfaces, limits, child processes."""
