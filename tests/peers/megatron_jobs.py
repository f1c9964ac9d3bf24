"""What megatron-core itself does in the tests: real GPT models and distributed optimizers, on gloo ranks without a GPU.

Megatron asks for a GPU wherever it makes tensors. The shims below answer with the CPU and change nothing else. Run as a
program (`python megatron_jobs.py RANK WORLD FOLDER JOB`), since Megatron starts processes of its own, which import this file.

Every value is a function of the name and place that Megatron itself gives it (`value`), so that any layout can be filled and
judged without another.
"""

import json
import os
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

STEP, LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, EXPERTS, RANK = 7, 2, 16, 4, 2, 24, 256, 4, 8
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS,
    "group_query_attention": True, "num_query_groups": GROUPS, "kv_channels": HIDDEN // HEADS, "vocab_size": VOCAB,
    "padded_vocab_size": VOCAB, "max_position_embeddings": 32, "norm_epsilon": 1e-5, "rotary_base": 10000,
    "position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "bf16": True, "transformer_impl": "local", "use_distributed_optimizer": True,
}  # fmt: skip


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and say of their type what Megatron looks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


def _shims() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.set_device = lambda *a, **k: None
    _OnCpu().__enter__()


@torch.enable_grad()
def build(job: dict[str, Any]) -> tuple[list[Any], Any]:
    """Model chunks and optimizer of one rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    tp, pp, vpp, ep = (job.get(name, 1) for name in ("tp", "pp", "vpp", "ep"))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.random.initialize_rng_tracker()
    experts = EXPERTS if job["model"] == "moe" else None
    config = TransformerConfig(
        num_layers=job.get("layers", LAYERS), hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=HIDDEN // HEADS, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False,
        use_cpu_initialization=True, perform_initialization=False, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1, num_moe_experts=experts, moe_ffn_hidden_size=FFN if experts else None,
        moe_router_topk=2, sequence_parallel=bool(experts and tp > 1), gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if experts and job.get("engine"):  # the keys of layers with Transformer Engine, which needs a GPU
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    chunks = []
    for chunk in range(vpp):
        stage = {"vp_stage": chunk} if vpp > 1 else {}
        model = GPTModel(
            config, spec, VOCAB, 32, position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vpp == 1, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vpp == 1, **stage),
            share_embeddings_and_output_weights=job.get("tied", False), **stage,
        ).bfloat16()  # fmt: skip
        if job.get("adapters"):
            for layer in model.decoder.layers:
                _adapt(layer, job["adapters"])
            model.bfloat16()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=not job.get("whole"),
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=job.get("bucket") is not None,
            bucket_size=job.get("bucket"),
        )
        chunks.append(DistributedDataParallel(config, ddp, model))
    adam = OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0,
        use_distributed_optimizer=not job.get("whole"),
    )  # fmt: skip
    optimizer = get_megatron_optimizer(adam, chunks)
    for one in optimizer.chained_optimizers:
        if hasattr(one, "_init_optimizer_states_with_dummy_values"):
            one._init_optimizer_states_with_dummy_values()
        else:
            one.init_state_fn(one.optimizer, one.config)
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            state["step"] = torch.tensor(float(STEP))
    return chunks, optimizer


def _adapt(layer: Any, kind: str) -> None:
    """Give a layer's matrices LoRA adapters as Megatron-Bridge makes and stores them: megatron-core's own linear layers, below
    `adapter` beside the weight; `split` ones for each projection of a matrix that holds several."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    def linear(cls: Any, into: int, out: int, config: Any, **how: Any) -> Any:
        return cls(into, out, config=config, init_method=torch.nn.init.zeros_, bias=False, **how)

    class Pair(torch.nn.Module):
        def __init__(self, base: Any, out: int, row: bool, gated: bool) -> None:
            super().__init__()
            self.gated = gated
            more = {"input_is_parallel": True, "skip_bias_add": True} if row else {"gather_output": True}
            into = base.input_size
            self.linear_in = linear(
                RowParallelLinear if row else ColumnParallelLinear, into, RANK, base.config, **more
            )
            self.linear_out = linear(ColumnParallelLinear, RANK, out, base.config, gather_output=row)

        def sharded_state_dict(
            self, prefix: str, sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            found = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
            out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
            key = f"{prefix}linear_out.weight"
            if self.gated:
                out[key] = apply_swiglu_sharded_factory(out[key], sharded_offsets)
            return {**found, **out}

    class Adapted(torch.nn.Module):
        def __init__(self, base: Any, adapters: dict[str, Any]) -> None:
            super().__init__()
            self.to_wrap = base
            for name, adapter in adapters.items():
                self.add_module(name, adapter)
            self.names = list(adapters)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            found = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
            for name in self.names:
                below = f"{prefix}adapter." if name == "adapter" else f"{prefix}adapter.{name}."
                found.update(getattr(self, name).sharded_state_dict(below, sharded_offsets, metadata))
            return found

    attention, mlp = layer.self_attention, layer.mlp
    q, kv = HIDDEN, HIDDEN // HEADS * GROUPS
    matrices = [
        (attention, "linear_qkv", False, {"adapter_q": q, "adapter_k": kv, "adapter_v": kv}),
        (attention, "linear_proj", True, {}),
        (mlp, "linear_fc1", False, {"adapter_gate": FFN, "adapter_up": FFN}),
        (mlp, "linear_fc2", True, {}),
    ]
    for owner, name, row, parts in matrices:
        base = getattr(owner, name)
        own = {"adapter": base.output_size} if kind == "fused" or not parts else parts
        gated = name == "linear_fc1" and kind == "fused"
        setattr(owner, name, Adapted(base, {n: Pair(base, out, row, gated) for n, out in own.items()}))


def _sharded_adapters(job: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of a model with adapters, and no optimizer."""
    chunks, _ = build(job)
    (state,) = sharded_model(chunks).values()
    return {"model": state}


def save_adapters(job: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    state = _sharded_adapters(job)
    for sharded in state["model"].values():
        if isinstance(getattr(sharded, "data", None), torch.Tensor):
            sharded.data.copy_(local(sharded, "param"))
            assert isinstance(sharded, ShardedTensorFactory) or sharded.data.shape == sharded.local_shape
    folder = Path(job["folder"])
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    state |= {"args": _args(job), "checkpoint_version": 3.0, "iteration": STEP}
    dist_checkpointing.save(state, str(folder))


def load_adapters(job: dict[str, Any]) -> None:
    """Load over NaN; every weight of the model and of its adapters is the known value."""
    from megatron.core import dist_checkpointing

    state = _sharded_adapters(job)
    expected = {}
    for key, sharded in state["model"].items():
        if isinstance(getattr(sharded, "data", None), torch.Tensor):
            expected[key] = local(sharded, "param").to(sharded.data.dtype)
            sharded.data.fill_(float("nan"))
    loaded = dist_checkpointing.load(state, job["folder"], strict="assume_ok_unexpected")["model"]
    assert sum(".adapter." in key for key in expected) >= 8 and any(
        ".adapter." not in key for key in expected
    )
    for key, tensor in expected.items():
        assert torch.equal(loaded[key], tensor), key


def _step_is_no_state() -> None:
    """megatron-core 0.16.1 looks for a `step` of every parameter where Adam is torch's, though it stores none."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    copy = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        step = self._get_main_param_and_optimizer_states(parameter).get("step")
        copy(self, parameter, {**tensors, **({"step": step} if step is not None else {})})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def value(key: str, slot: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor stored under a key: any bits, but the same wherever it is asked for."""
    key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")  # two spellings of one tensor
    generator = torch.Generator().manual_seed(zlib.crc32(f"{slot} {key}".encode()))
    made = torch.randn(shape, generator=generator)
    return made.square() if slot == "exp_avg_sq" else made


def local(sharded: Any, slot: str) -> torch.Tensor:
    """One rank's part of `value`, where Megatron says it lies."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(sharded, ShardedTensorFactory):
        return sharded.merge_fn([local(part, slot) for part in sharded.build()])
    whole = value(sharded.key, slot, tuple(sharded.global_shape))
    sizes = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    here = tuple(slice(a, a + n) for a, n in zip(sharded.global_offset, sizes, strict=True))
    return whole[here].reshape(sharded.local_shape)


def sharded_model(chunks: list[Any]) -> dict[str, Any]:
    """The sharded state of every chunk under the names that Megatron's training loop gives them."""
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    return {
        name: chunk.module.sharded_state_dict(metadata={}) for name, chunk in zip(names, chunks, strict=True)
    }


def _parameters(chunks: list[Any]) -> dict[Any, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    held = {}
    for state in sharded_model(chunks).values():
        for sharded in nested_values(state):
            if isinstance(getattr(sharded, "data", None), torch.nn.Parameter | torch.Tensor):
                held[sharded.data.data_ptr()] = sharded
    return held


def states(chunks: list[Any], optimizer: Any) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """`(what, tensor, expected)` of every weight and every part of state that this rank holds."""
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    held = _parameters(chunks)
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            sharded = held[parameter.data_ptr()]
            found.append((name, parameter.data, local(sharded, "param").bfloat16()))
    for one in optimizer.chained_optimizers:
        if hasattr(one, "model_param_gbuf_map"):
            for parameter in one.model_param_gbuf_map:
                sharded = held[parameter.data_ptr()]
                range_ = one._get_model_param_range_map(parameter)["param"]
                for slot, tensor in one._get_main_param_and_optimizer_states(parameter).items():
                    if slot != "step":
                        expected = local(sharded, slot).flatten()[range_.start : range_.end]
                        found.append((f"{slot} of {sharded.key}", tensor, expected.view(tensor.shape)))
            continue
        for halves, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for half, main in zip(halves, mains, strict=True):
                sharded = held[half.data_ptr()]
                found.append((f"param of {sharded.key}", main.data, local(sharded, "param")))
                for slot in ("exp_avg", "exp_avg_sq"):
                    tensor = one.optimizer.state[main][slot]
                    found.append((f"{slot} of {sharded.key}", tensor, local(sharded, slot)))
    return found


def _rank_names() -> dict[str, int]:
    from megatron.core import parallel_state as p

    return {
        "tp": p.get_tensor_model_parallel_rank(),
        "pp": p.get_pipeline_model_parallel_rank(),
        "ep": p.get_expert_model_parallel_rank(),
    }


def _args(job: dict[str, Any]) -> Any:
    """The arguments of such a run, as Megatron's training loop stores them."""
    from argparse import Namespace

    made = {
        **ARGS, "num_layers": job.get("layers", LAYERS), "world_size": torch.distributed.get_world_size(),
        "tensor_model_parallel_size": job.get("tp", 1), "pipeline_model_parallel_size": job.get("pp", 1),
        "virtual_pipeline_model_parallel_size": job["vpp"] if job.get("vpp", 1) > 1 else None,
        "expert_model_parallel_size": job.get("ep", 1), "expert_tensor_parallel_size": 1,
        "untie_embeddings_and_output_weights": not job.get("tied", False),
        "use_distributed_optimizer": not job.get("whole", False),
        "overlap_grad_reduce": job.get("bucket") is not None, "ddp_bucket_size": job.get("bucket"),
    }  # fmt: skip
    if job["model"] == "moe":
        made.update(num_experts=EXPERTS, moe_ffn_hidden_size=FFN, moe_router_topk=2)
    return Namespace(**made)


def _optimizer_metadata(kind: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": kind,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }


def _state(job: dict[str, Any], chunks: list[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    """What Megatron's training loop saves and loads."""
    from megatron.core import parallel_state as p
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    model = sharded_model(chunks)
    kept = dict(model) if len(chunks) > 1 else model["model"]
    state: dict[str, Any] = {
        **model,
        "optimizer": optimizer.sharded_state_dict(
            kept, is_loading=loading, metadata=_optimizer_metadata(job["form"])
        ),
    }
    if job.get("rng", True):  # as --no-load-rng leaves it out
        state["rng_state"] = ShardedObject(
            "rng_state",
            [{"torch_rng_state": torch.arange(5, dtype=torch.uint8), "random_rng_state": (3, (1, 2), None)}],
            (p.get_pipeline_model_parallel_world_size(), p.get_tensor_model_parallel_world_size()),
            (p.get_pipeline_model_parallel_rank(), p.get_tensor_model_parallel_rank()),
            replica_id=p.get_data_parallel_rank(with_context_parallel=True),
        )
    if not loading:
        state |= {
            "args": _args(job),
            "checkpoint_version": 3.0,
            "iteration": STEP,
            "opt_param_scheduler": {"max_lr": 0.01, "num_steps": STEP},
            "num_floating_point_operations_so_far": 12345,
        }
    return state


def save(job: dict[str, Any]) -> None:
    """Fill everything with known values and save it as `torch_dist`."""
    from megatron.core import dist_checkpointing

    chunks, optimizer = build(job)
    _set_groups(optimizer, 0.01, 0.1)
    for _, tensor, expected in states(chunks, optimizer):
        tensor.copy_(expected)
    folder = Path(job["folder"])
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        _state(job, chunks, optimizer, False), str(folder), content_metadata=_optimizer_metadata(job["form"])
    )


def load(job: dict[str, Any]) -> None:
    """Load a `torch_dist` checkpoint over NaN and compare every bit with the known values."""
    from megatron.core import dist_checkpointing

    chunks, optimizer = build(job)
    _set_groups(optimizer, 77.0, 77.0)
    for _, tensor, _ in states(chunks, optimizer):
        tensor.fill_(float("nan"))
    state = _state(job, chunks, optimizer, True)
    loaded = dist_checkpointing.load(state, job["folder"], strict="assume_ok_unexpected")
    for name in sharded_model(chunks):
        chunk = chunks[int(name.removeprefix("model") or 0)]
        chunk.module.load_state_dict(loaded[name])
    optimizer.load_state_dict(loaded["optimizer"])
    _judge(job, chunks, optimizer)
    _step(chunks, optimizer)
    assert loaded["iteration"] == STEP
    if job.get("rng", True):
        assert loaded["rng_state"][0]["torch_rng_state"].tolist() == [0, 1, 2, 3, 4]


def _judge(job: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    checked = 0
    for what, tensor, expected in states(chunks, optimizer):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), what
        checked += 1
    assert checked
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            assert "step" not in state or float(state["step"]) == STEP
        for group in one.optimizer.param_groups:
            assert group["lr"] == 0.01 and group["wd_mult"] in (0.0, 1.0)


def _set_groups(optimizer: Any, lr: float, decay: float) -> None:
    """Hyper-parameters as Megatron's schedule sets them before each step: weights of one dimension do not decay."""
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            group.update(lr=lr, weight_decay=decay * group["wd_mult"])


def _step(chunks: list[Any], optimizer: Any) -> None:
    """Train one step on known gradients: every bit is that of torch's AdamW on the values that were saved, in any layout."""
    held = _parameters(chunks)
    for chunk in chunks:
        for parameter in chunk.module.parameters():
            parameter.main_grad.copy_(local(held[parameter.data_ptr()], "grad"))
    expected = []
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            state["step"] = state[
                "step"
            ].clone()  # megatron-core gives all of them one tensor, which torch's Adam counts up
        for main, sharded, part in _mains(one, held):
            made = torch.nn.Parameter(part(local(sharded, "param")).clone())
            decay = 0.1 if local(sharded, "param").ndim > 1 else 0.0
            judge = torch.optim.AdamW([made], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
            judge.state[made] = {
                "step": torch.tensor(float(STEP)),
                **{slot: part(local(sharded, slot)).clone() for slot in ("exp_avg", "exp_avg_sq")},
            }
            made.grad = part(local(sharded, "grad"))
            judge.step()
            expected.append((sharded.key, one, main, made.detach(), judge.state[made]))
    assert optimizer.step()[0]
    for key, one, main, weight, state in expected:
        assert torch.equal(main.data.view(-1), weight.view(-1)), f"{key} after a step"
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(one.optimizer.state[main][slot].view(-1), state[slot].view(-1)), (
                f"{slot} of {key}"
            )


def _mains(one: Any, held: dict[Any, Any]) -> Any:
    """The float32 weights of an optimizer: each with the tensor that it is a part of, and how to take that part."""
    if hasattr(one, "model_param_gbuf_map"):
        for parameter in one.model_param_gbuf_map:
            range_ = one._get_model_param_range_map(parameter)["param"]
            group, order = one.model_param_group_index_map[parameter]
            main = one.optimizer.param_groups[group]["params"][order]

            def part(whole: torch.Tensor, range_: Any = range_) -> torch.Tensor:
                return whole.flatten()[range_.start : range_.end]

            yield main, held[parameter.data_ptr()], part
        return
    for halves, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        for half, main in zip(halves, mains, strict=True):
            yield main, held[half.data_ptr()], lambda whole: whole


def _folder(job: dict[str, Any]) -> Path:
    """The folder of this rank, as Megatron names it."""
    at = _rank_names()
    name = f"mp_rank_{at['tp']:02d}"
    name += f"_{at['pp']:03d}" if job.get("pp", 1) > 1 else ""
    name += f"_{at['ep']:03d}" if job.get("ep", 1) > 1 else ""
    return Path(job["folder"]) / name


def _model_state(chunks: list[Any]) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    return {
        name: chunk.module.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks, strict=True)
    }


def save_legacy(job: dict[str, Any]) -> None:
    """Fill everything with known values and save it as Megatron's training loop does with `--ckpt-format torch`."""
    from megatron.core import parallel_state as p

    chunks, optimizer = build(job)
    _set_groups(optimizer, 0.01, 0.1)
    for _, tensor, expected in states(chunks, optimizer):
        tensor.copy_(expected)
    dense = p.get_data_parallel_rank(with_context_parallel=True) == 0
    expert = job["model"] == "moe" and p.get_expert_data_parallel_rank() == 0
    folder = _folder(job)
    if dense or expert:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    if not job.get("whole"):
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if dense or expert:
        state = {
            "args": _args(job),
            "checkpoint_version": 3.0,
            "iteration": STEP,
            **_model_state(chunks),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": {"max_lr": 0.01, "num_steps": STEP},
            "rng_state": [{"torch_rng_state": torch.arange(5, dtype=torch.uint8)}],
        }
        torch.save(state, folder / "model_optim_rng.pt")


def load_legacy(job: dict[str, Any]) -> None:
    """Load what `save_legacy` has, over NaN, and compare every bit."""
    chunks, optimizer = build(job)
    _set_groups(optimizer, 77.0, 77.0)
    for _, tensor, _ in states(chunks, optimizer):
        tensor.fill_(float("nan"))
    folder = _folder(job)
    state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    for name, chunk in zip(_model_state(chunks), chunks, strict=True):
        chunk.module.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    if not job.get("whole"):
        optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    _judge(job, chunks, optimizer)
    _step(chunks, optimizer)
    assert state["iteration"] == STEP


JOBS = {
    "save": save, "load": load, "save_legacy": save_legacy, "load_legacy": load_legacy,
    "save_adapters": save_adapters, "load_adapters": load_adapters,
}  # fmt: skip


def main() -> None:
    rank, world, meeting, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    job = json.loads(text)
    torch.set_num_threads(1)
    _shims()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    _step_is_no_state()
    with torch.no_grad():
        JOBS[job["do"]](job)
    torch.distributed.barrier()
    os._exit(0)  # Megatron's helper processes would keep the rank alive


if __name__ == "__main__":
    main()
