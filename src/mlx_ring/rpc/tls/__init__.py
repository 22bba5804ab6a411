"""Who is at the other end: credentials, names, peers, and what is said when one is refused."""
