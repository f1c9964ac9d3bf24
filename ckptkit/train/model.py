"""ZAYA1, one pipeline stage of it, on one rank.

    R = (embed(tokens) + b) s                                           fp32, [B, S, D]
    for each layer:
        a    = attention(x)                                             x is the norm of R
        R, y = (a + b_h) s_h + (R + b_r) s_r, its norm                  one kernel
        m, r = mixture(y, r)                                            r: the router's state, [B, S, width]
        R, x = (m + b_h') s_h' + (R + b_r') s_r', the next layer's norm of it
    logits = embed^T norm(R)

Stages hand on R and r, with gradients. Weights are those of `ckptkit.train.held`, under the names that Transformers'
`ZayaForCausalLM` has; sums and norms are by `ckptkit.kernels`.
"""

from typing import Any

import torch
from torch import nn

from ckptkit.core.schema import Model
from ckptkit.kernels.rmsnorm import Vectors, rmsnorm_residual
from ckptkit.train import initial, vocab
from ckptkit.train.cca import Attention, bias
from ckptkit.train.config import Config
from ckptkit.train.context import Context
from ckptkit.train.dims import Dims
from ckptkit.train.held import Holding, Node, add, held
from ckptkit.train.moe import Mixture
from ckptkit.train.parallel import Parallel


class Stage(nn.Module):
    """The layers of one stage, with the embedding on the first and the head on the last.

    Attributes:
        holds: The local tensors of this rank, by name.
        load: int64 [layers here, E + 1]: tokens of each class that this rank routed since it was last set to zero.
    """

    def __init__(self, config: Config, model: Model, parallel: Parallel) -> None:
        super().__init__()
        self.dims = self.dims_of(model)
        self.model_sizes = model.sizes
        self.parallel = parallel
        layout = parallel.layout
        self.dtype = dtype_of(config.train.dtype, parallel.device)
        kernels = config.train.dispatch or None
        self.kernels = kernels
        self.context = Context(parallel, config.train.seq_len)
        self.attention = Attention(self.dims, parallel, self.context, self.dtype)
        self.mixture = Mixture(self.dims, parallel, config.train.skip, kernels)
        self.layers = [
            i for i, s in enumerate(layout.stage_of_layers(self.dims.layers)) if s == parallel.pp.index
        ]
        self.holds: dict[str, Holding] = {item.key: item for item in held(model, layout, parallel.rank)}
        for item in self.holds.values():
            value = torch.zeros(item.local.shape, device=parallel.device, dtype=self._dtype(item))
            add(self, item.key, nn.Parameter(value) if item.tensor.kind == "param" else value)
        classes = self.dims.experts + 1
        self.load = torch.zeros(len(self.layers), classes, dtype=torch.int64, device=parallel.device)
        values = {key: tensor.detach() for key, tensor in self.state_dict(keep_vars=True).items()}
        initial.fill(list(self.holds.values()), values, model.tensors, config.train.seed, self.dims.init_std)

    @staticmethod
    def dims_of(model: Model) -> Dims:
        """Sizes of a model. Raises UsageError for a configuration that training does not know."""
        return Dims.of(model)

    def _dtype(self, item: Holding) -> torch.dtype:
        return torch.float32 if item.tensor.keep_fp32 else self.dtype

    @property
    def state_width(self) -> int:
        """Width of the router's state."""
        return self.model_sizes["router_hidden"]

    @property
    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the output layer, on the last stage."""
        here: Any = self
        own: Any = getattr(here, "lm_head", Node())
        return (own.weight if hasattr(own, "weight") else here.model.embed_tokens.weight), bias(own)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Tokens int64 [B, T] on the first stage, else R [B, S, D] and r [B, S, width].

        Returns:
            R and r, or on the last stage the normed R.
        """
        model: Any = getattr(self, "model", None)
        state: torch.Tensor | None = None
        if self.parallel.is_first:
            e = vocab.embed(inputs[0], model.embed_tokens.weight, self.dims, self.parallel)
            residual = ((e + model.input_hidden_states_bias) * model.input_hidden_states_scale).float()
        else:
            residual, state = inputs
        x: torch.Tensor | None = None
        for number, index in enumerate(self.layers):
            layer = model.layers[index]
            if x is None:
                x = norm(residual, layer.input_layernorm.weight, self.dims.eps)
            a = self.attention(x, layer.self_attn, index)
            scales, weight = layer.post_attention_residual_scale, layer.post_attention_layernorm.weight
            residual, y = rmsnorm_residual(a, residual, vectors(scales, weight), self.dims.eps, self.kernels)
            load = self.load[number] if self.training else None
            m, state = self.mixture(y, state, layer.mlp, load)
            scales, weight = layer.post_mlp_residual_scale, self._next_norm(model, number)
            if weight is None:  # the next stage norms
                residual, x = merge(m, residual, scales), None
            else:
                residual, x = rmsnorm_residual(
                    m, residual, vectors(scales, weight), self.dims.eps, self.kernels
                )
        if not self.parallel.is_last:
            return residual, state
        return x if x is not None else norm(residual, model.norm.weight, self.dims.eps)

    def _next_norm(self, model: Any, number: int) -> torch.Tensor | None:
        """The norm that follows a layer, None where it is on the next stage."""
        if number + 1 < len(self.layers):
            return model.layers[self.layers[number + 1]].input_layernorm.weight
        return model.norm.weight if self.parallel.is_last else None

    def loss(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The summed cross-entropy of `targets` int64 [B, T] given the last stage's output."""
        weight, extra = self.head
        return vocab.cross_entropy(h, weight, extra, targets, self.dims, self.parallel)


def vectors(scales: Any, weight: torch.Tensor) -> Vectors:
    """A half-layer's residual scales and the norm after it."""
    return Vectors(
        scales.hidden_states_scale,
        scales.hidden_states_bias,
        scales.residual_scale,
        scales.residual_bias,
        weight,
    )


def merge(hidden: torch.Tensor, residual: torch.Tensor, scales: Any) -> torch.Tensor:
    """The residual stream after a half-layer, fp32."""
    hidden = (hidden.float() + scales.hidden_states_bias.float()) * scales.hidden_states_scale.float()
    return hidden + (residual + scales.residual_bias.float()) * scales.residual_scale.float()


def norm(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the stream, in the dtype of the weight."""
    x = residual.to(weight.dtype).float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(weight.dtype)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a field of the configuration means on a device; `auto` is bfloat16 on a GPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32
