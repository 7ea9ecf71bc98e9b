"""A drafter that vLLM has never heard of; plugin.py says what is registered."""
