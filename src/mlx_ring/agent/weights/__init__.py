"""How a node gets the tensors of its layers from other nodes, keeps them, and gives them on."""
