"""Profile mode: a worker that measures its device for a few seconds, and ends.

`products.py` times products with weights, `steps.py` the other costs of steps. `rounds.py` repeats them in turns until
the time is up, and `measure.py` combines the results. Everything is set up as in a worker that serves.
"""
