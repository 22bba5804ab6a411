"""Profile mode: a worker that measures what its device does in a second, and ends.

`products.py` times products with weights, `steps.py` what steps cost besides, `rounds.py` repeats all of it in turns until
its time is up, `measure.py` puts it together. Everything is set up as in a worker that serves.
"""
