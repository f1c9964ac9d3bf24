"""Drills: training runs under named fault plans, each ending with a verdict on what was promised.

| module | what it does |
|---|---|
| `base` | what a drill is, the registry, the faults that drills must cover |
| `verdict` | what was observed, and what follows from it |
| `ledger` | what a run was told to be safe, and which steps a fault must leave |
| `light` | runs of ranks without a model: real daemons, real processes, every byte compared |
| `training` | runs of the ZAYA1 loop: the loss curve against the undisturbed one |
| `catalogue/` | the drills |
| `runner` | many drills and seeds, a few at a time |
| `report` | the page |
"""
