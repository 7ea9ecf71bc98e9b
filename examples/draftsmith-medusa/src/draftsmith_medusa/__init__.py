"""Medusa heads for draftsmith; plugin.py says what is registered."""
