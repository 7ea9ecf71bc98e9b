"""vLLM's OpenAI-compatible server as a capture endpoint: the command that starts it, and what is added inside it."""
