"""Device kernels: fused training steps and the snapshot's digests, packs and checks.

Every operation has a torch form and a Triton form of one signature; some have a HIP C++ twin as well.
`ckptkit.kernels.dispatch.choose` picks one for a device. Nothing here imports the rest of ckptkit but its
errors; importing this package, or `dispatch`, loads neither torch nor triton, and any module of it can be
imported on a machine that has no GPU and no triton.

| module | what it offers |
|---|---|
| `rmsnorm` | `rmsnorm_residual`: residual scaling and RMSNorm, forward and backward |
| `router` | `route`: router MLP, balancing bias, top-1 and dispatch indices |
| `newton_schulz` | `newton_schulz`: Muon's orthogonalisation, symmetric products computed by halves |
| `adamw` | `AdamWTable`, `adamw_step`: AdamW over many tensors in one launch |
| `digest` | `leaf_digests`: XXH3-128 of 1 MiB leaves |
| `pack` | `PackPlan`, `pack`, `unpack`: many tensors to one buffer and back, digested on the way |
| `native` | compiles and launches the `.hip` sources through the driver of the machine |
| `aot` | compiles everything for gfx942 without a GPU: registers, spills, LDS |
| `selftest` | each kernel against its torch form, on the machine at hand |
"""
