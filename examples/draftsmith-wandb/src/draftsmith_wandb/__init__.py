"""Runs of draftsmith in Weights & Biases; plugin.py says what is registered."""
