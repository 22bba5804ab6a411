"""Ranks of Open MPI without `mpirun`: the agent starts the workers itself.

A rank learns its place, and what the others tell of themselves, from a PMIx server, to which the environment leads it.
`mpirun` is one, and more: it starts the ranks itself, and listens for other daemons on every network, to which it is
obliged. Here a small process of ours serves PMIx with the same library, on loopback, and the agent starts the ranks as it starts
every worker.
"""
