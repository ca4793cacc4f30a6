"""Safetensors directories: what is read lazily, and what each kind of damage is called."""

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from arbi_core.builtin.safetensors_format import SafetensorsCheckpoint, SafetensorsFormat
from arbi_core.errors import CheckpointError
from arbi_core.loader.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write_raw(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder).tensors()
    return str(caught.value)


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool],
    ids=str,
)  # fmt: skip
def test_every_dtype_keeps_its_name_and_its_numbers(folder, dtype):
    saved = torch.arange(6).reshape(2, 3).remainder(2).to(dtype)
    save_file({"x": saved}, folder / "model.safetensors")
    source = SafetensorsCheckpoint(folder).tensors()["x"]
    assert (source.shape, source.dtype, source.encoding) == ((2, 3), str(dtype).removeprefix("torch."), "dense")
    loaded = source.load()
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), saved.view(torch.uint8))


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_slice_is_what_narrow_would_cut(tmp_path_factory, shape, data):
    path = tmp_path_factory.mktemp("slices") / "x.safetensors"
    saved = torch.randn(shape)
    save_file({"x": saved}, path)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    length = data.draw(st.one_of(st.none(), st.integers(0, shape[dim] - start)))
    part = SafetensorsFile(path).sources()["x"].load(dim, start, length)
    assert torch.equal(part, saved.narrow(dim, start, shape[dim] - start if length is None else length))


def test_scalars_and_empty_tensors_are_read(folder):
    save_file({"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}, folder / "model.safetensors")
    tensors = SafetensorsCheckpoint(folder).tensors()
    assert tensors["scalar"].load().item() == 3.0
    assert tensors["empty"].load().shape == (0, 4)


def test_tensors_come_in_the_order_of_the_file(folder):
    header = {
        "late": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "__metadata__": {"format": "pt"},
        "early": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    write_raw(folder / "model.safetensors", header, struct.pack("<ff", 1.0, 2.0))
    assert list(SafetensorsCheckpoint(folder).tensors()) == ["early", "late"]


def test_looking_at_the_tensors_maps_no_file(folder):
    save_file({"x": torch.ones(4)}, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    source = checkpoint.tensors()["x"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        source.load()


def test_tensors_stay_valid_when_the_checkpoint_is_closed(folder):
    save_file({"x": torch.full((1000,), 2.0)}, folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    loaded = checkpoint.tensors()["x"].load()
    checkpoint.close()
    assert loaded.sum().item() == 2000.0


# -- which files count ------------------------------------------------------------------------------------------------


def test_one_whole_file_wins_over_others_when_there_is_no_index(folder):
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    save_file({"x": torch.zeros(1), "y": torch.zeros(1)}, folder / "consolidated.safetensors")
    tensors = SafetensorsCheckpoint(folder).tensors()
    assert list(tensors) == ["x"]
    assert tensors["x"].load().item() == 1.0


def test_numbered_shards_need_no_index(folder):
    save_file({"x": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    save_file({"y": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    assert sorted(SafetensorsCheckpoint(folder).tensors()) == ["x", "y"]


def test_a_gap_between_numbered_shards_is_named(folder):
    save_file({"x": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_two_files_with_the_same_tensor_and_no_index_are_refused(folder):
    save_file({"x": torch.ones(1)}, folder / "a.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "b.safetensors")
    assert "both a.safetensors and b.safetensors hold x" in refusal(folder)


def test_index_decides_between_two_shards_with_the_same_tensor(folder):
    save_file({"x": torch.ones(1)}, folder / "a.safetensors")
    save_file({"x": torch.zeros(1), "y": torch.zeros(1)}, folder / "b.safetensors")
    write_index(folder, {"x": "a.safetensors", "y": "b.safetensors"})
    assert SafetensorsCheckpoint(folder).tensors()["x"].load().item() == 1.0


def test_tensor_unknown_to_the_index_is_kept_for_the_weight_map_to_judge(folder):
    save_file({"x": torch.ones(1), "stray": torch.ones(1)}, folder / "a.safetensors")
    write_index(folder, {"x": "a.safetensors"})
    assert "stray" in SafetensorsCheckpoint(folder).tensors()


def test_missing_shards_are_counted(folder):
    save_file({"x": torch.ones(1)}, folder / "a.safetensors")
    write_index(folder, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
    said = refusal(folder)
    assert "b.safetensors is missing; the index names it" in said
    assert "2 of 3 shards are missing" in said


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/model.safetensors", "weights.bin", 3])
def test_index_may_only_name_safetensors_files_of_its_directory(folder, shard):
    write_index(folder, {"x": shard})
    assert f"places x in {shard!r}" in refusal(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_index_without_a_map_is_refused(folder, index):
    (folder / INDEX).write_text(json.dumps(index))
    assert "has no weight_map" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_named_and_safetensors_asked_for(folder, name):
    (folder / name).write_bytes(b"pickle")
    said = refusal(folder)
    assert name in said
    assert "convert them to safetensors" in said


def test_directory_without_weights_points_to_dummy_weights(folder):
    assert "--load-format dummy" in refusal(folder)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_empty_file_is_truncated(folder):
    (folder / "model.safetensors").write_bytes(b"")
    assert "truncated or not a safetensors file" in refusal(folder)


def test_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(folder)


def test_header_longer_than_the_format_allows_is_not_read(folder):
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", 200_000_000))
        f.truncate(300_000_000)
    assert "its header has 200000000 bytes" in refusal(folder)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[1]", "it holds a JSON list"),
        (b"\xff\xfe{}", "corrupt header"),
        (b"[" * 100_000, "corrupt header"),
        ({"x": 3}, "tensor x is described by 3"),
        ({"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, "tensor x has dtype 'F4'"),
        ({"x": {"shape": [1], "data_offsets": [0, 4]}}, "tensor x has dtype None"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"shape \[-1\]"),
        ({"x": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "shape '1'"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, r"data_offsets \[0\]"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "cannot lie in the -4 bytes"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "cannot lie in the 4 bytes"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "its tensors need .* and the file has"),
    ],
)
def test_corrupt_header_is_named_with_its_tensor(folder, header, says):
    write_raw(folder / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=says) as caught:
        SafetensorsCheckpoint(folder).tensors()
    assert "model.safetensors" in str(caught.value)


def test_overlapping_tensors_are_refused_when_the_file_is_mapped(folder):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_raw(folder / "model.safetensors", {"x": entry, "y": entry}, b"\0" * 4)
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        SafetensorsCheckpoint(folder).tensors()["x"].load()


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_escape_as_another_kind_of_error(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    path.write_bytes(raw)
    try:
        sources = SafetensorsFile(path).sources()
    except CheckpointError:
        return
    assert sources == {}


@pytest.mark.parametrize("text", ["{", "[1]", "", "\x00"])
def test_config_that_is_no_json_object_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (is not valid JSON|must hold a JSON object)"):
        SafetensorsCheckpoint(folder).config()


def test_config_that_is_no_text_is_named(folder):
    (folder / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match="config.json is not UTF-8 text"):
        SafetensorsCheckpoint(folder).config()


def test_directory_without_a_config_is_not_of_this_format(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1)}, file)
    checkpoint_format = SafetensorsFormat()
    assert not checkpoint_format.detect(tmp_path)
    assert not checkpoint_format.detect(file)
    with pytest.raises(CheckpointError, match="config.json is missing"):
        checkpoint_format.open(tmp_path).config()
