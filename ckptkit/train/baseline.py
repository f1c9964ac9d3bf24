"""A Mixtral-style decoder, to compare ZAYA1 with: grouped-query attention, a linear softmax router, the best 2 of 8 experts.

    for each layer:
        R = R + attention(norm(R))
        R = R + sum over the chosen two of p_e expert_e(norm(R)),     p: softmax over all experts, scaled to sum 1
    logits = head norm(R)

Equal to Transformers' `MixtralForCausalLM`, whose parameters it has under the same names. Every rank has the whole model: data
parallelism and ZeRO-1 only. Shapes: B batch, T tokens, D hidden, E experts, N = B T.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError
from ckptkit.train import initial, vocab
from ckptkit.train.config import Config
from ckptkit.train.context import Context, rotary, rotate
from ckptkit.train.dims import Dims
from ckptkit.train.held import Holding, add, held
from ckptkit.train.model import dtype_of, norm
from ckptkit.train.moe import Permute, experts
from ckptkit.train.parallel import Parallel


class Baseline(nn.Module):
    """The whole model on one rank; attributes and methods are those of `ckptkit.train.model.Stage`.

    Raises:
        LayoutError: the layout cuts the model.
    """

    state_width = 0

    def __init__(self, config: Config, model: Model, parallel: Parallel) -> None:
        super().__init__()
        layout = parallel.layout
        if layout.world != layout.dp or layout.ep > 1:
            raise LayoutError(
                f"layout {layout}: mixtral models are trained whole on every rank: use dp and zero"
            )
        self.dims = self.dims_of(model)
        self.chosen = int(model.config["num_experts_per_tok"])
        self.coefficient = float(model.config.get("router_aux_loss_coef", 0.0))
        self.parallel = parallel
        self.dtype = dtype_of(config.train.dtype, parallel.device)
        self.kernels = config.train.dispatch or None
        self.context = Context(parallel, config.train.seq_len)
        self.table = rotary(self.context.positions, self.dims.thetas[0], self.dims.rotary, self.dtype)
        self.layers = list(range(self.dims.layers))
        self.holds: dict[str, Holding] = {item.key: item for item in held(model, layout, parallel.rank)}
        for item in self.holds.values():
            add(
                self,
                item.key,
                nn.Parameter(torch.zeros(item.local.shape, device=parallel.device, dtype=self.dtype)),
            )
        # One class more than experts, as models with a skip expert have it; nothing is ever counted there.
        self.load = torch.zeros(
            len(self.layers), self.dims.experts + 1, dtype=torch.int64, device=parallel.device
        )
        self.balance: list[torch.Tensor] = []
        values = {key: tensor.detach() for key, tensor in self.state_dict(keep_vars=True).items()}
        initial.fill(list(self.holds.values()), values, model.tensors, config.train.seed, self.dims.init_std)

    @staticmethod
    def dims_of(model: Model) -> Dims:
        """Sizes of a model."""
        return _dims(model)

    @property
    def head(self) -> tuple[torch.Tensor, None]:
        """Weight of the output layer."""
        here: Any = self
        return (here.model.embed_tokens if self.dims.tied else here.lm_head).weight, None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The normed last state [B, T, D] of tokens int64 [B, T]."""
        here: Any = self
        self.balance = []
        residual = vocab.embed(tokens, here.model.embed_tokens.weight, self.dims, self.parallel)
        for index in self.layers:
            layer = here.model.layers[index]
            residual = residual + self._attention(
                norm(residual, layer.input_layernorm.weight, self.dims.eps), layer.self_attn
            )
            y = norm(residual, layer.post_attention_layernorm.weight, self.dims.eps)
            residual = residual + self._mixture(y, layer.mlp, index)
        return norm(residual, here.model.norm.weight, self.dims.eps)

    def loss(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The summed cross-entropy of `targets` int64 [B, T], and in training the routers' balancing loss as often."""
        weight, extra = self.head
        total = vocab.cross_entropy(h, weight, extra, targets, self.dims, self.parallel)
        if self.training and self.coefficient:
            # Switch Transformers, equations 4 to 6, over all layers together: least when every expert has the same share.
            chosen, likely = torch.stack(self.balance).mean(0)
            total = total + self.coefficient * targets.numel() * self.dims.experts * (chosen * likely).sum()
        return total

    def _attention(self, x: torch.Tensor, w: Any) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (
            F.linear(x, p.weight).view(b, t, -1, self.dims.head_dim) for p in (w.q_proj, w.k_proj, w.v_proj)
        )
        a = self.context.attend(rotate(q, *self.table), rotate(k, *self.table), v, self.dims.windows[0])
        return F.linear(a.reshape(b, t, -1), w.o_proj.weight)

    def _mixture(self, y: torch.Tensor, w: Any, index: int) -> torch.Tensor:
        rows = y.flatten(0, -2)
        p = F.linear(rows, w.gate.weight).float().softmax(-1)
        share, choice = p.topk(self.chosen, -1)  # [N, chosen]
        share = (share / share.sum(-1, keepdim=True)).to(y.dtype)
        counts = torch.bincount(choice.flatten(), minlength=self.dims.experts)
        if self.training:
            self.load[index, :-1] += counts
            self.balance.append(torch.stack([counts / len(rows), p.mean(0)]))
        order = torch.argsort(choice.flatten(), stable=True)  # of rows repeated `chosen` times
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=y.device)
        repeated = rows.repeat_interleave(self.chosen, 0)
        m = Permute.apply(
            experts(Permute.apply(repeated, order, back), counts.tolist(), w.experts), back, order
        )
        return (m.view(-1, self.chosen, y.shape[-1]) * share[..., None]).sum(1).view(y.shape)


def _dims(model: Model) -> Dims:
    """Sizes of a Mixtral model, every layer of which attends to all tokens before."""
    config, sizes = model.config, model.sizes
    rope = config.get("rope_parameters") or {}
    layers = sizes["layers"]
    return Dims(
        layers=layers,
        hidden=sizes["hidden"],
        vocab=sizes["vocab"],
        heads=sizes["kv_head"] * sizes["group"],
        kv_heads=sizes["kv_head"],
        head_dim=sizes["head_dim"],
        experts=sizes["expert"],
        ffn=sizes["expert_ffn"],
        windows=(0,) * layers,
        thetas=(float(rope.get("rope_theta") or config["rope_theta"]),) * layers,
        rotary=sizes["head_dim"],
        eps=float(config.get("rms_norm_eps", 1e-5)),
        init_std=float(config.get("initializer_range", 0.02)),
        pad_token=-1,
        tied=bool(model.flags["tied"]),
    )
