"""LoRA adapters in a `torch_dist` checkpoint, as Megatron-Bridge stores them beside the weights.

    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight               [layers, rank, hidden], one for all rows
    decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_out.weight    one for each projection ("canonical" LoRA)
    decoder.layers.3.mlp.linear_fc2.adapter.linear_in.weight                        layers that differ

How these are cut over ranks does not matter: they are stored with global shapes.
Source: Megatron-Bridge, `peft/adapter_wrapper.py`, `peft/canonical_lora.py`, `peft/utils.py`.
"""

import re

from ckptkit.core.adapters import possible, with_adapters
from ckptkit.core.schema import Model
from ckptkit.errors import FormatError, LayoutError
from ckptkit.formats.dcp_metadata import Index
from ckptkit.formats.megatron_keys import StoredKeys

_ADAPTER = re.compile(r"(?:(?:chained_\d+\.)?optimizer\.state\.\w+\.)?(?P<key>.+\.adapter\..+\.weight)")


def with_stored_adapters(model: Model | None, family: str, index: Index, where: str) -> Model | None:
    """The model with the adapters that the checkpoint's keys and shapes say.

    Raises:
        FormatError: an adapter belongs to no matrix of the model, or its shape says no rank.
    """
    stored = {match["key"]: key for key in index.tensors if (match := _ADAPTER.fullmatch(key))}
    if model is None or not stored or family not in model.families:
        return model
    slots = possible(model, family)
    every = with_adapters(model, {tensor: 1 for slot in slots.values() for tensor in slot.tensors})
    by_key = StoredKeys(every, family).by_key
    found: dict[str, int] = {}
    try:
        for of, key in stored.items():
            table = by_key.get(of)
            if table is None:
                raise FormatError(
                    f"{where}: {of} adapts no matrix of {model.schema.id}. Give the configuration of the model that was adapted "
                    "with --config",
                    tensor=of,
                )
            for name, address in table.values():
                rank = slots[name].rank(of, index.tensors[key].shape[len(address.sizes) :])
                found.update(dict.fromkeys(slots[name].tensors, rank))
        return with_adapters(model, found)
    except LayoutError as error:
        raise FormatError(f"{where}: {error}", **error.facts) from error
