"""The core's tests must not need a plugin of this repository, so they bring their own: small, and real."""
