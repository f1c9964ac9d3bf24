"""The engine: moves bytes, decides nothing. `plan (core) → run → folder in place`; see `ckptkit.engine.run`."""
