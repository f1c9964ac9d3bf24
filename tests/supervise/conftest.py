"""Tests of the supervisor."""

collect_ignore = ["trainer.py"]  # a program, run by the supervisor
