"""Communication between processes: messages, channels, tensors, links."""
