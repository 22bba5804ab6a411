"""Settings, where they come from, and the names they had before."""
