"""Sizes that the forward pass needs, read from a bound model's configuration."""

from dataclasses import dataclass
from typing import Any

from ckptkit.core.schema import Model
from ckptkit.errors import UsageError


@dataclass(frozen=True)
class Dims:
    """Sizes of the whole model, and what its layers do that no shape tells.

    Attributes:
        layers, hidden, vocab, heads, kv_heads, head_dim, experts, ffn: Sizes; `ffn` of one expert.
        windows: Of each layer, how many tokens it attends to, the current one included; 0 for all before it.
        thetas: Of each layer, the base of its rotary frequencies.
        rotary: How many of a head's dimensions are rotated.
        eps: Of the norms.
        init_std: Of the initial matrices.
        pad_token: The token whose embedding gets no gradient from its use as input; -1 for none.
        tied: Whether the output layer is the embedding.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    ffn: int
    windows: tuple[int, ...]
    thetas: tuple[float, ...]
    rotary: int
    eps: float
    init_std: float
    pad_token: int
    tied: bool

    @classmethod
    def of(cls, model: Model) -> "Dims":
        """Of a ZAYA model. Raises UsageError for a configuration whose layers training does not know."""
        config, sizes = model.config, model.sizes
        layers = sizes["layers"]
        types = config.get("layer_types") or ["hybrid"] * layers
        if len(types) != layers or set(types) - {"hybrid", "hybrid_sliding"}:
            raise UsageError(
                f"the model's layer_types must be {layers} times hybrid or hybrid_sliding, not {types}"
            )
        window = int(config.get("sliding_window") or 0)
        if "hybrid_sliding" in types and window < 1:
            raise UsageError("the model has hybrid_sliding layers, but no sliding_window")
        rope = {kind: _rope(config, kind) for kind in set(types)}
        partial = {share for _, share in rope.values()}
        if len(partial) > 1:
            raise UsageError(
                "the model's layer types rotate different shares of a head, which training does not know"
            )
        if config.get("attention_dropout"):
            raise UsageError("the model has attention_dropout; training knows none: set it to 0")
        if config.get("clamp_temp"):
            raise UsageError("the model has clamp_temp, which training does not know")
        pad = config.get("pad_token_id")
        return cls(
            layers=layers,
            hidden=sizes["hidden"],
            vocab=sizes["vocab"],
            heads=sizes["head"],
            kv_heads=sizes["kv_head"],
            head_dim=sizes["head_dim"],
            experts=sizes["expert"],
            ffn=sizes["expert_ffn"],
            windows=tuple(window if kind == "hybrid_sliding" else 0 for kind in types),
            thetas=tuple(rope[kind][0] for kind in types),
            rotary=int(sizes["head_dim"] * partial.pop()),
            eps=float(config.get("rms_norm_eps", 1e-5)),
            init_std=float(config.get("initializer_range", 0.02)),
            pad_token=-1 if pad is None else int(pad),
            tied=bool(model.flags["tied"]),
        )


def _rope(config: dict[str, Any], kind: str) -> tuple[float, float]:
    """Base and rotated share of a layer type."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get(kind, rope)
    if rope.get("rope_type", "default") != "default":
        raise UsageError(
            f"the model's rope_type {rope['rope_type']!r} is not known to training; it knows default"
        )
    if "rope_theta" not in rope:
        raise UsageError(f"the model's rope_parameters give no rope_theta for {kind} layers")
    return float(rope["rope_theta"]), float(rope.get("partial_rotary_factor", 0.5))
