"""The names under which the parts of objects are compared."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsci_launch.weights.formats.torch_file import read_torch_file, walk_tensors
from bigsci_launch.weights.formats.torch_objects import TorchObjects
from bigsci_launch.weights.objects.flatten import flatten
from bigsci_launch.weights.objects.nodes import Instance, Named, TensorNode

from .zoo import Color, module, optimizer, save

MESH = Named("torch.distributed.device_mesh", "DeviceMesh")


def names(tree: Any) -> dict[str, Any]:
    return {leaf.name: leaf.node for leaf in flatten(tree)}


def test_a_module_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    model = module()
    path = save({"net": model}, tmp_path / "a.pt")
    found = [name for name, _ in walk_tensors(read_torch_file(path).tree)]
    assert found == [f"net.{name}" for name in model.state_dict()]


def test_an_optimizers_parameters_are_keys_by_number(tmp_path: Path) -> None:
    path = save(optimizer(), tmp_path / "a.pt")
    found = [name for name, _ in walk_tensors(read_torch_file(path).tree)]
    assert {"state.key 0", "state.0.exp_avg", "state.key 1", "param_groups.0.params.1"} <= set(found)


def test_the_hash_that_a_mesh_keeps_is_left_out() -> None:
    """Text hashes otherwise in every process, so no two meshes would be equal."""
    states = [{"_hash": 7, "_mesh": [0, 1]}]
    assert names(Instance(MESH, states=states)) == {"__class__": MESH, "_mesh.0": 0, "_mesh.1": 1}
    foreign = Named("somewhere", "Digest")
    assert names(Instance(foreign, states=states))["_hash"] == 7


@pytest.mark.parametrize("state", [{"a": 1, "b": 2}, ({"a": 1}, {"b": 2}), (None, {"a": 1, "b": 2})])
def test_attributes_have_one_name_wherever_python_keeps_them(state: Any) -> None:
    inner = (Named("torch", "float32"), (2,), (1,), False)
    rebuilt = TorchObjects().make(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (Named("torch._utils", "_rebuild_meta_tensor_no_storage"), Named("lib", "Weight"), inner, state),
    )
    assert {"attributes.a": 1, "attributes.b": 2, "class": Named("lib", "Weight")}.items() <= names(rebuilt).items()


def test_a_tensor_in_a_set_is_not_read(tmp_path: Path, diff: Any) -> None:
    path = save({"w": torch.ones(2), "odd": {torch.ones(3)}}, tmp_path / "a.pt")
    answer = diff(path, path, "--json")
    assert answer.code == 4
    assert {entry["entry"] for entry in answer.document["not_read"]} == {"odd"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_jagged_tensor_has_each_of_its_parts_once(tmp_path: Path, diff: Any) -> None:
    """Its pickle has them as arguments and as attributes."""

    def jagged(last: float) -> Any:
        made = torch.nested.nested_tensor([torch.ones(2), torch.tensor([1.0, 2.0, last])], layout=torch.jagged)
        made.note = "kept"
        return made

    a, b = (save({"w": jagged(last)}, tmp_path / f"{last}.pt") for last in (3, 4))
    held = names(read_torch_file(a).tree)
    assert {name for name, node in held.items() if isinstance(node, TensorNode)} >= {"w.values", "w.offsets"}
    assert not any(name.startswith(("w.attributes._values", "w.attributes._offsets")) for name in held)
    assert held["w.attributes.note"] == "kept"
    (entry,) = diff(a, b, "--json").document["different"]
    assert (entry["tensor"], entry["first_at"]) == ("w.values", [4])


def test_an_attribute_of_a_jagged_tensor_that_is_another_object_is_compared() -> None:
    values, other = TensorNode("0", "F32", 0, (5,), (1,)), TensorNode("1", "F32", 0, (5,), (1,))
    state = {"_values": other, "_offsets": values, "_ragged_idx": 2, "values": values}
    parts = {"values": values, "offsets": values, "_ragged_idx": 1, "requires_grad": False}
    rebuilt = TorchObjects().make(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (Named("torch.nested._internal.nested_tensor", "_rebuild_njt"), Named("lib", "Nested"), (parts,), state),
    )
    found = names(rebuilt)
    assert {name for name in found if name.startswith("attributes")} == {"attributes._values", "attributes._ragged_idx"}
    assert found["attributes._values"] == other


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_member_of_an_enumeration_by_getattr_has_its_dotted_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """So Python 3.11.2 pickles it."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    torch.save({"color": Color.RED}, tmp_path / "a.pt", pickle_protocol=protocol)
    assert names(read_torch_file(tmp_path / "a.pt").tree)["color"] == Named(Color.__module__, "Color.RED")
