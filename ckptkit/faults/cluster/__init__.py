"""A cluster on one machine: real daemons, ranks and the network between them, each of which may be broken.

| module | what it is |
|---|---|
| `nodes` | `Cluster`: nodes with their daemons, processes of ranks, epochs |
| `rank` | a rank without a model: arrays whose values follow from the step, saved through the cache and compared at every restore |
| `proxy` | what every connection between nodes passes through |
| `nursery` | forks daemons and ranks in milliseconds |
| `objects` | a local S3 (needs moto) |
"""
