"""Runs of draftsmith in MLflow; plugin.py says what is registered."""
