"""Does a draft pay off? Methods of one verifier measured side by side, and what is made of the figures."""
