"""Goodput: how much of a run's time is useful, in closed form, by simulation and from a run's log."""
