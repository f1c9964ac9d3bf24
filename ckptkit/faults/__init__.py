"""Faults: what they cost (goodput), what a crash can leave behind (crash), and making them happen (inject)."""
