"""What travels between processes: messages, channels, tensors, links."""
