"""Making faults happen to real programs: a plan drawn from a seed, and what carries each kind of fault out.

| module | faults of |
|---|---|
| `plan` | none: what happens when and to whom, drawn from a seed, printed, replayed |
| `processes` | processes and nodes: kill, hang, slow, out of memory, loss of a node with its memory |
| `program` | the inside of Python programs, switched on by their environment: exceptions, storage faults, clock jumps |
| `storage` | calls to the file system: ENOSPC, EIO, short and slow writes, death at the n-th call |
| `fuse` | the same below any program, and power loss: what was not synced is lost or torn (needs FUSE) |
| `network` | connections, through a proxy: partition, delay, rate, reset, truncation, HTTP answers such as 503 |
| `netem` | whole network namespaces (needs the right to make them, and the kernel's netem) |
| `memory` | bits of slots, files and arrays |
"""
