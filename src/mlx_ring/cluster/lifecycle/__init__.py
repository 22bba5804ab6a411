"""Start and stop of a cluster from one file, over the user's own ssh."""
