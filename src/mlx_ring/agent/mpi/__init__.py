"""Ranks of Open MPI without `mpirun`: the agent starts the workers itself.

A rank gets its place and the other ranks' data from a PMIx server, whose address is in the environment. `mpirun` is one.
It also starts the ranks itself, and must listen for other daemons on every network. Here a small process serves PMIx with the
same library, on loopback, and the agent starts the ranks as it starts every worker.
"""
