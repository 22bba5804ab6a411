"""Transfer of the tensors of a node's layers from other nodes: fetching, storing and serving."""
