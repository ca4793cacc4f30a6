"""Weight maps laid over models and checkpoints: order, optional tensors, formats, and every way not to fit."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from arbi_core.builtin.safetensors_format import SafetensorsCheckpoint
from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.errors import WeightError
from arbi_core.loader.base import WeightContext
from arbi_core.loader.load import DUMMY_DRAWS, load_dummy, load_weights
from arbi_core.model.linear import MergedColumnParallelLinear
from arbi_core.model.loadable import LoadableModule
from arbi_core.model.norm import RMSNorm
from arbi_core.spec import WeightMap, WeightShardSpec
from support.sources import MemoryTensor

CPU = torch.device("cpu")
CTX = WeightContext(CPU, torch.float32, SingleProcessGroup.spec)
ENTRIES = (
    WeightShardSpec("norm.weight", "n"),
    WeightShardSpec("up.weight", "a", 0, "a"),
    WeightShardSpec("up.weight", "b", 0, "b", aliases=("b_old",)),
)


class Model(nn.Module):
    def __init__(self, bias=False, width=4):
        super().__init__()
        group = SingleProcessGroup()
        self.norm = RMSNorm(width, 1e-6, dtype=torch.float32)
        self.up = MergedColumnParallelLinear(width, {"a": 2, "b": 3}, bias=bias, group=group, dtype=torch.float32)


def checkpoint(**tensors):
    whole = {"n": torch.full((4,), 2.0), "a": torch.randn(2, 4), "b": torch.randn(3, 4), **tensors}
    return {name: MemoryTensor(name, value) for name, value in whole.items() if value is not None}


def load(model, tensors, *extra, ignored=(), **options):
    return load_weights(model, WeightMap((*ENTRIES, *extra), ignored), tensors, ctx=CTX, **options)


class Counter:
    def __init__(self):
        self.total, self.done, self.steps = None, 0, 0

    def start(self, total, label):
        self.total, self.label = total, label

    def advance(self, amount):
        self.done, self.steps = self.done + amount, self.steps + 1


def test_pieces_are_stacked_in_the_order_of_the_module():
    model, tensors = Model(), checkpoint()
    report = load(model, tensors)
    assert torch.equal(model.up.weight, torch.cat((tensors["a"].value, tensors["b"].value)))
    assert (report.tensors, report.linears) == (3, {"dense": 1})


def test_alias_fills_where_the_usual_name_is_absent():
    model, old = Model(), torch.randn(3, 4)
    load(model, checkpoint(b=None, b_old=old))
    assert torch.equal(model.up.weight[2:], old)


def test_alias_beside_the_usual_name_is_unexpected():
    with pytest.raises(WeightError, match="1 unexpected: b_old"):
        load(Model(), checkpoint(b_old=torch.randn(3, 4)))


def test_long_lists_are_cut_and_counted():
    stray = {f"stray.{i:02}": torch.zeros(1) for i in range(30)}
    with pytest.raises(WeightError) as caught:
        load(Model(), checkpoint(**stray))
    said = str(caught.value)
    assert "30 unexpected: stray.00, " in said
    assert "stray.11 and 18 more" in said
    assert "stray.12" not in said


def test_ignored_tensors_are_no_surprise():
    load(Model(), checkpoint(**{"rotary.inv_freq": torch.zeros(2)}), ignored=(r".*\.inv_freq",))


def test_quantised_checkpoint_is_recognised_by_its_scales():
    with pytest.raises(WeightError, match=r"unexpected: a.weight_scale; it looks quantised"):
        load(Model(), checkpoint(**{"a.weight_scale": torch.ones(1)}))


def test_integers_are_not_taken_for_weights():
    tensors = checkpoint(a=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(WeightError, match=r"1 weights hold integers, .*\(installed: none\): a \(int32\)"):
        load(Model(), tensors)
    assert tensors["b"].reads == []


def test_nothing_is_read_when_something_does_not_fit():
    tensors = checkpoint(b=torch.zeros(4, 4))
    with pytest.raises(WeightError, match=r"1 misshapen: b is \(4, 4\) instead of \(3, 4\)"):
        load(Model(), tensors)
    assert all(t.reads == [] for t in tensors.values())


def test_parameters_are_read_in_the_order_of_the_checkpoint(monkeypatch):
    monkeypatch.setattr("arbi_core.loader.load.LOAD_THREADS", 1)
    read = []

    class Noted(MemoryTensor):
        def load(self, dim=None, start=0, length=None):
            read.append(self.name)
            return super().load(dim, start, length)

    tensors = {name: Noted(name, t.value) for name, t in reversed(checkpoint().items())}
    load(Model(), tensors)
    assert read == ["a", "b", "n"]


def test_progress_counts_the_bytes_of_the_file():
    progress = Counter()
    tensors = checkpoint(a=torch.randn(2, 4).bfloat16(), n=torch.ones(4).half())
    load(Model(), tensors, progress=progress)
    assert progress.total == progress.done == 2 * 4 * 2 + 3 * 4 * 4 + 4 * 2
    assert progress.steps == 2


def test_packed_source_says_its_own_size():
    progress, tensors = Counter(), checkpoint()
    packed = SimpleNamespace(name="a", shape=(2, 4), dtype="float32", encoding="x:q4", nbytes=5, load=tensors["a"].load)
    load(Model(), {**tensors, "a": packed}, progress=progress)
    assert progress.done == 5 + 3 * 4 * 4 + 4 * 4


def test_first_failure_is_raised_as_it_is():
    tensors = checkpoint()

    def broken(*_):
        raise OSError("disk")

    tensors["n"] = SimpleNamespace(name="n", shape=(4,), dtype="float32", encoding="dense", load=broken)
    with pytest.raises(OSError, match="disk"):
        load(Model(), tensors)


def test_loaded_parameters_do_not_change_with_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({name: t.value for name, t in checkpoint().items()}, file)
    opened = SafetensorsCheckpoint(tmp_path)
    model = Model()
    load(model, opened.tensors())
    opened.close()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with file.open("r+b") as f:
        f.seek(-100, 2)
        f.write(b"\xff" * 100)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# -- optional tensors -------------------------------------------------------------------------------------------------


class Scaled(LoadableModule):
    def __init__(self, device):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64, device=device), requires_grad=False)


def test_optional_parameter_keeps_the_value_that_it_was_built_with():
    model = Model()
    model.extra = Scaled("cpu")
    entry = WeightShardSpec("extra.scale", "s", optional=True)
    load(model, checkpoint(), entry)
    assert model.extra.scale.tolist() == [3.0, 3.0]
    assert model.extra.scale.dtype is torch.float32
    load(model, checkpoint(s=torch.ones(2)), entry)
    assert model.extra.scale.tolist() == [1.0, 1.0]


def test_optional_parameter_without_a_value_is_named():
    model = Model()
    model.extra = Scaled("meta")
    with pytest.raises(WeightError, match="leaves 1 parameters unfilled: extra.scale"):
        load(model, checkpoint(), WeightShardSpec("extra.scale", "s", optional=True))


def test_half_of_a_merged_parameter_is_missing_even_if_optional():
    optional = tuple(WeightShardSpec("up.bias", f"{k}.bias", 0, k, optional=True) for k in "ab")
    with pytest.raises(WeightError, match="1 missing: b.bias"):
        load(Model(bias=True), checkpoint(**{"a.bias": torch.ones(2)}), *optional)


# -- maps that do not belong to the model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (WeightShardSpec("nowhere.weight", "x"), "fills nowhere.weight, which the model does not have"),
        (WeightShardSpec("norm.bias", "x"), "fills norm.bias, which the model does not have"),
        (WeightShardSpec("weight", "x"), "the model is a Model that loads nothing"),
        (WeightShardSpec("up.weight", "x", 0, "c"), r"up.weight with the pieces \['a', 'b', 'c'\], but it consists of"),
        (WeightShardSpec("up.weight", "x", 0, "a"), r"up.weight with the pieces \['a', 'b', 'a'\]"),
        (WeightShardSpec("up.bias", "x", 0, "a"), r"up.bias with the pieces \['a'\]"),
    ],
)
def test_entry_that_the_model_cannot_take_is_named(entry, says):
    with pytest.raises(WeightError, match=says):
        load(Model(bias=True), checkpoint(x=torch.ones(2)), entry)


def test_parameters_that_the_map_forgets_are_named():
    with pytest.raises(WeightError, match="leaves 1 parameters unfilled: up.bias"):
        load(Model(bias=True), checkpoint())


def test_buffers_left_on_the_meta_device_are_named():
    model = Model()
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(WeightError, match="1 buffers were built on the meta device and hold nothing: table"):
        load(model, checkpoint())


# -- weight formats ---------------------------------------------------------------------------------------------------


class Doubling:
    """Holds a linear as twice its numbers, in a tensor of its own."""

    def __init__(self, name, takes=True):
        self.name, self.detection_priority, self.takes, self.asked = name, 0, takes, []

    def linear_method(self, layer, pieces, ctx):
        self.asked.append(([p.spec.source for p in pieces], ctx))
        return self if self.takes else None

    def load(self, layer, pieces, device, dtype):
        self.held = torch.cat([p.source.load() for p in pieces]) * 2

    def apply(self, layer, x):
        return x @ self.held.T


def test_first_format_that_takes_a_linear_holds_it():
    first, second, third = Doubling("first", takes=False), Doubling("second"), Doubling("third")
    model, tensors = Model(), checkpoint()
    report = load(model, tensors, weight_formats=(first, second, third))
    assert report.linears == {"second": 1}
    assert first.asked == second.asked == [(["a", "b"], CTX)]
    assert third.asked == []
    assert model.up.weight is None
    x = torch.randn(1, 4)
    assert torch.equal(model.up(x), x @ (torch.cat((tensors["a"].value, tensors["b"].value)) * 2).T)


def test_format_may_hold_integers():
    report = load(
        Model(),
        checkpoint(**{k: torch.ones(r, 4, dtype=torch.int8) for k, r in (("a", 2), ("b", 3))}),
        weight_formats=(Doubling("codes"),),
    )
    assert report.linears == {"codes": 1}


# -- dummy weights ----------------------------------------------------------------------------------------------------


def dummy(model, seed=1, **options):
    load_dummy(model, WeightMap(options.pop("entries", ENTRIES)), device=CPU, dtype=torch.float32, seed=seed, **options)
    return model


def test_dummy_norms_are_one_biases_zero_and_the_rest_small():
    biases = tuple(WeightShardSpec("up.bias", f"{k}.bias", 0, k) for k in "ab")
    model = dummy(Model(bias=True, width=2000), entries=(*ENTRIES, *biases))
    assert model.norm.weight.unique().tolist() == [1.0]
    assert model.up.bias.unique().tolist() == [0.0]
    assert model.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(model.up.weight[0], model.up.weight[2])


def test_dummy_weights_depend_on_seed_and_name_only():
    first, again, other = dummy(Model()), dummy(Model()), dummy(Model(), seed=2)
    assert torch.equal(first.up.weight, again.up.weight)
    assert not torch.equal(first.up.weight, other.up.weight)
    renamed = tuple(WeightShardSpec(e.param, f"new.{e.source}", e.shard_dim, e.shard_id) for e in ENTRIES)
    assert not torch.equal(first.up.weight, dummy(Model(), entries=renamed).up.weight)


def test_rows_of_a_large_dummy_tensor_all_differ():
    rows, width = 40, 2**17
    assert rows * width > DUMMY_DRAWS
    model = Model(width=width)
    model.up = MergedColumnParallelLinear(
        width, {"a": rows, "b": 1}, bias=False, group=SingleProcessGroup(), dtype=torch.float32
    )
    weight = dummy(model).up.weight
    assert len({tuple(row[:8].tolist()) for row in weight}) == rows + 1
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    normed = weight[:rows] / weight[:rows].norm(dim=1, keepdim=True)
    assert (normed @ normed.T - torch.eye(rows)).abs().max().item() < 0.02


def test_dummy_weights_show_progress():
    progress = Counter()
    dummy(Model(), progress=progress)
    assert progress.total == progress.done == (4 + 20) * 4
    assert progress.label == "making random weights"
