"""Native multi-token-prediction heads: plugin.py names everything, the other files implement one question each."""
