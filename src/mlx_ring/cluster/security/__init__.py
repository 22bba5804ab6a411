"""Who belongs to the cluster: its authority, join tokens, members, and how a machine becomes one."""
