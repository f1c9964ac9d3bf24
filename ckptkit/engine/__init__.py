"""Moves bytes, decides nothing: buffers, copies, digests, the journal, executors."""
