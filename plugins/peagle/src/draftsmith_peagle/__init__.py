"""P-EAGLE for draftsmith: plugin.py names everything, the other files implement one question each."""
