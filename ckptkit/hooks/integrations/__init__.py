"""Frameworks: small modules that call `Checkpointer` where a trainer calls nothing itself."""
