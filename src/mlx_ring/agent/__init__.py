"""The process that represents a node and supervises its workers."""
