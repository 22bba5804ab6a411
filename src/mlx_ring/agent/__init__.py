"""The process that represents a node: it alone starts, watches and ends workers. It computes nothing."""
