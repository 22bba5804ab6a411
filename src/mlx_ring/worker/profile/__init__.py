"""Profile mode: a worker that measures its device for a few seconds, and ends.

`measure.py` times products with weights, `steps.py` the other costs of steps, and `rounds.py` repeats them in turns
until the time is up. Everything is set up as in a worker that serves.
"""
