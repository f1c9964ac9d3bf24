"""The node cache: the latest checkpoint stays in the memory of every node."""
