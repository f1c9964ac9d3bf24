"""Files of torch.save."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ckptkit.core.catalog import Catalog
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.schema import StoredNames
from ckptkit.errors import FormatError, ShardMissingError, UnsafeError
from ckptkit.formats.base import WriteOptions
from ckptkit.formats.reference import Truth, gather, random_truth, same, stored_truth, toy, write
from ckptkit.formats.suite import FormatSuite
from ckptkit.formats.torch_file import TorchFormat
from ckptkit.ops import sources
from ckptkit.ops.verifying import verify
from ckptkit.stores.local import LocalStore


class TestTorch(FormatSuite):
    make = TorchFormat


def read(root: Path) -> Catalog:
    return TorchFormat().read(LocalStore(root))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


class Net(torch.nn.Module):
    """Two layers, tied weights, and a buffer between parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(x)))
        return out


def trained(make: Callable[[Net], torch.optim.Optimizer]) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_a_state_dict_is_read_bit_for_bit(tmp_path: Path) -> None:
    """Views, shared storages, module metadata, scalars and every kind of dtype lie where torch put them."""
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        **Net().state_dict(),
        "t": base.t(),
        "cut": base[1:3, ::2],
        "bf16": base.bfloat16(),
        "flag": torch.tensor(True),
    }
    torch.save(state, tmp_path / "weights.pth")

    values = gather(tmp_path, read(tmp_path))

    assert {name for name, _ in values} == set(state)
    for (name, _), array in values.items():
        assert array.tobytes() == bits(state[name]) and array.shape == tuple(state[name].shape), name


def test_training_state_with_numbers_gets_names(tmp_path: Path) -> None:
    """`optimizer.state_dict()` numbers parameters; one group follows the model's order, past buffers and ties."""
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2, "note": "x"},
        tmp_path / "a.pt",
    )

    found = read(tmp_path)
    values = gather(tmp_path, found)

    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert values[names[id(parameter)], slot].tobytes() == bits(slots[slot])
    [group] = found.extras.common["groups"]
    assert (group["kind"], group["step"], group["lr"]) == ("adamw", 2, 0.1)
    assert sorted(group["tensors"]) == sorted(names.values())
    assert found.step == 2


def test_named_groups_keep_their_members(tmp_path: Path) -> None:
    """Several groups are told apart where the optimizer was made from named parameters."""
    model, optimizer = trained(
        lambda m: torch.optim.AdamW(
            [
                {"params": [(n, p) for n, p in m.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
                {"params": [(n, p) for n, p in m.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
            ]
        )
    )
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")

    groups = read(tmp_path).extras.common["groups"]

    assert [g["tensors"] for g in groups] == [["embed.weight"], ["norm.weight", "norm.bias", "head.bias"]]


def test_numbers_that_cannot_be_named_are_said(tmp_path: Path) -> None:
    """Two groups without names could be any parameters: weights are read, and the rest is told to be left out."""

    def two_groups(m: Net) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [m.embed.weight]},
            {"params": [m.norm.weight, m.norm.bias, m.head.bias]},
        ]
        return torch.optim.AdamW(groups)

    model, optimizer = trained(two_groups)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")

    found = read(tmp_path)

    assert {role for _, role in found.held} == {"param"}
    assert "left out" in found.facts["warnings"][0]


def test_torch_goes_on_from_what_we_wrote(tmp_path: Path) -> None:
    """The file loads with weights_only, and the next step of a fresh model equals the original's."""
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    state: Any = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.save(state, tmp_path / "a.pt")
    found = read(tmp_path)
    truth = Truth(
        StoredNames(found.tensors), found.tensors, found.held, gather(tmp_path, found), found.extras
    )

    write(TorchFormat(), truth, tmp_path / "out")

    loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    again = Net()
    fresh = torch.optim.AdamW(again.parameters(), lr=9.0)
    again.load_state_dict(loaded["model"])
    set_optimizer_state_dict(again, fresh, loaded["optimizer"])
    step(model, optimizer, 7)
    step(again, fresh, 7)
    assert {n: bits(t) for n, t in again.state_dict().items()} == {
        n: bits(t) for n, t in model.state_dict().items()
    }
    for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert {slot: bits(t) for slot, t in ours.items()} == {slot: bits(t) for slot, t in theirs.items()}


def test_weights_alone_are_a_plain_state_dict(tmp_path: Path) -> None:
    """Without training state, `load_state_dict(torch.load(...))` works at once, and zip tools find no fault."""
    truth = random_truth(toy(), "transformers")

    write(TorchFormat(), truth, tmp_path)

    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(loaded) == set(truth.names.unpadded())
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None


def test_files_are_cut_at_the_size_asked_for(tmp_path: Path) -> None:
    """A numbered set is read as one, and is refused when a number is missing."""
    float32 = dtype_named("float32")
    truth = stored_truth({f"w{n}": ((100,), float32) for n in range(5)})

    write(TorchFormat(), truth, tmp_path, options=WriteOptions(max_shard_size=900))

    paths = sorted(path.name for path in tmp_path.iterdir())
    assert paths == [f"model-0000{n}-of-00003.pt" for n in (1, 2, 3)]
    same(gather(tmp_path, read(tmp_path)), truth.values)
    (tmp_path / paths[1]).unlink()
    with pytest.raises(ShardMissingError, match="number 2 is missing"):
        read(tmp_path)


def test_a_folder_of_parts_is_read_as_one(tmp_path: Path) -> None:
    """Files of any names that share no key are one state dict; a key in two of them is an error."""
    torch.save({"layer.0": torch.ones(2)}, tmp_path / "layer_00.pt")
    torch.save({"layer.1": torch.zeros(3)}, tmp_path / "layer_01.pt")

    assert {name for name, _ in gather(tmp_path, read(tmp_path))} == {"layer.0", "layer.1"}
    torch.save({"layer.1": torch.zeros(3)}, tmp_path / "layer_02.pt")
    with pytest.raises(FormatError, match="no parts of one checkpoint"):
        read(tmp_path)


def test_hostile_files_are_refused_and_not_run(tmp_path: Path) -> None:
    """A call nested in optimizer state is refused with its name; nothing happens."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    state = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(2), "x": Evil()}}},
    }
    torch.save(state, tmp_path / "model.pt")

    with pytest.raises(UnsafeError, match="system"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_flipped_bit_is_found_by_the_checksums_of_the_zip(tmp_path: Path) -> None:
    """Torch's files and ours state a CRC-32 of every storage, which `verify` compares; torch itself never does."""
    torch.save({"w": torch.arange(5000.0)}, tmp_path / "model.pt")
    assert verify(str(tmp_path)).fault_count == 0
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[9000] ^= 4
    (tmp_path / "model.pt").write_bytes(data)

    found = verify(str(tmp_path))

    assert torch.load(tmp_path / "model.pt", weights_only=True) is not None
    assert found.exit_code == 1 and "model/data/0 of model.pt" in found.faults[0].what


def test_files_written_without_checksums_are_not_called_damaged(tmp_path: Path) -> None:
    """Where torch was told to compute none, all are zero: verify says that it could not check."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(50.0)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)

    found = verify(str(tmp_path))

    assert found.fault_count == 0 and any("digests" in text for text in found.not_checked)


def test_one_file_among_others_is_a_checkpoint(tmp_path: Path) -> None:
    """Its path opens it alone, with the configuration beside it; other weights in the folder do not matter."""
    torch.save({"w": torch.ones(3)}, tmp_path / "step_10.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "step_20.pt")
    (tmp_path / "notes.md").write_text("a")

    found = sources.open(str(tmp_path / "step_20.pt"))

    assert [file.path for file in found.catalog.files] == ["step_20.pt"]
    assert set(found.catalog.extras.files) == {"notes.md"}
    assert gather(tmp_path, found.catalog)["w", "param"].tobytes() == bytes(12)
    with pytest.raises(FormatError, match="no parts of one checkpoint"):
        sources.open(str(tmp_path))


def test_a_lightning_checkpoint_is_read(tmp_path: Path) -> None:
    """`.ckpt` files have `state_dict` and a list of one optimizer; hyper-parameters come along."""
    model, optimizer = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    state = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 3,
        "global_step": 2,
    }
    torch.save({**state, "hyper_parameters": {"width": 4}}, tmp_path / "last.ckpt")

    found = sources.open(str(tmp_path / "last.ckpt")).catalog
    values = gather(tmp_path, found)

    assert {name for name, role in values if role == "param"} == set(model.state_dict())
    assert values["norm.bias", "exp_avg"].tobytes() == bits(optimizer.state[model.norm.bias]["exp_avg"])
    assert found.step == 2 and found.extras.common["groups"][0]["lr"] == 0.1
    assert ["hyper_parameters.width", ["hyper_parameters", "width"], 4] in found.extras.common[
        "torch_objects"
    ]


def test_a_whole_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A pickled module is code; its state dict is data."""
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")

    with pytest.raises(UnsafeError, match=r"torch\.nn\.modules\.linear\.Linear.*save its state_dict\(\)"):
        read(tmp_path)
