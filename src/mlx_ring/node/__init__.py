"""Composition root: builds a head from settings, and takes it down again."""
