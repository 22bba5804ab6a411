"""Identity of peers: credentials, names, and errors of refused connections."""
