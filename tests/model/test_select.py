"""Which backend serves which kind of layer."""

import pytest
import torch
from attrs import frozen

from arbi_core.backend.select import select_backends
from arbi_core.builtin.reference_attention import arbi_attention_backends
from arbi_core.errors import BackendError, ConfigError, UnknownNameError
from arbi_core.spec import NONE, PAGED_KV, LayerSpec, StateKind

ONE = (LayerSpec(0),)
CPU = torch.device("cpu")
OTHER = StateKind("other")


@frozen
class Fake:
    """A backend that may refuse."""

    name: str
    state_kind: str = OTHER
    reason: str | None = None

    def supports(self, layer, device):
        return self.reason


def offered(*more):
    return {f"{b.state_kind}:{b.name}": b for b in (*arbi_attention_backends(), *more)}


def select(layers=ONE, kv_dtype="auto", chosen=(), extra=()):
    return {k: b.name for k, b in select_backends(layers, offered(*extra), kv_dtype, chosen, CPU).items()}


@pytest.mark.parametrize(
    ("kv_dtype", "name"),
    [("auto", "reference"), ("bf16", "reference-bf16"), ("fp16", "reference-fp16"), ("fp32", "reference-fp32")],
)
def test_core_names_of_the_cache_dtype(kv_dtype, name):
    assert select(kv_dtype=kv_dtype) == {PAGED_KV: name}


def test_any_other_name_is_that_of_an_installed_backend():
    assert select(kv_dtype="mine", extra=(Fake("mine", PAGED_KV),)) == {PAGED_KV: "mine"}


def test_an_explicit_choice_wins_over_the_cache_dtype():
    assert select(kv_dtype="bf16", chosen=["paged_kv:reference-fp32"]) == {PAGED_KV: "reference-fp32"}


def test_a_name_nobody_offers_lists_what_is_installed_and_what_would_bring_it():
    with pytest.raises(
        UnknownNameError, match=r"tkv-k4v4.*installed: .*paged_kv:reference.*pip install arbi-plugin-tkv"
    ):
        select(kv_dtype="tkv-k4v4")
    with pytest.raises(UnknownNameError, match="other:nope"):
        select(chosen=["other:nope"])


@pytest.mark.parametrize("chosen", [["reference"], [":x"], ["paged_kv:"], ["paged_kv:reference", "paged_kv:reference"]])
def test_malformed_choices_name_the_field(chosen):
    with pytest.raises(ConfigError, match=r"cache\.backends"):
        select(chosen=chosen)


def test_a_kind_of_a_plugin_takes_the_first_backend_that_serves_it():
    layers = (LayerSpec(0), LayerSpec(1, OTHER), LayerSpec(2, NONE))
    assert select(layers, extra=(Fake("a", reason="too wide"), Fake("b"))) == {PAGED_KV: "reference", OTHER: "b"}


def test_a_kind_that_nobody_serves_gives_every_reason():
    with pytest.raises(BackendError, match=r"layer 1 needs.*other:a: too wide; other:b: too old"):
        select((LayerSpec(0), LayerSpec(1, OTHER)), extra=(Fake("a", reason="too wide"), Fake("b", reason="too old")))
    with pytest.raises(BackendError, match="no installed plugin offers one"):
        select((LayerSpec(0, OTHER),))


def test_a_chosen_backend_that_refuses_a_layer_says_why():
    with pytest.raises(BackendError, match="paged_kv:mine cannot serve layer 0: no windows"):
        select(kv_dtype="mine", extra=(Fake("mine", PAGED_KV, "no windows"),))
