"""The focal loss for draftsmith; plugin.py says what is registered."""
