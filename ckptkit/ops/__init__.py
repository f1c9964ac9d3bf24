"""What users do with checkpoints: the Python API behind `ckptkit` and the command line."""
