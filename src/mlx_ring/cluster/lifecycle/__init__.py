"""Starting and ending a cluster from one file, over the user's own ssh."""
