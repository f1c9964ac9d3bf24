"""The embedded ZAYA1 training loop."""
