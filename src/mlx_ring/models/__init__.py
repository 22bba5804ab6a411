"""Models on disk: folders, sources, architectures, and the shares of their tensors."""
