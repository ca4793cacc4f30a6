"""What the dense family reads from a config, and what it refuses."""

import pytest
from attrs import asdict, evolve

from arbi_core.builtin.dense import DenseFamily
from arbi_core.errors import UnsupportedModelError

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
BASE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(family="Llama", **settings):
    return DenseFamily().parse_config({**BASE, **settings, "architectures": [f"{family}ForCausalLM"]})


def transformers_config(family, **settings):
    import transformers

    return getattr(transformers, f"{family}Config")(**settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_transformers_writes_is_understood(family):
    written = transformers_config(family).to_dict()
    spec = DenseFamily().parse_config({**written, "architectures": [f"{family}ForCausalLM"]})
    assert spec.dims.hidden_size == written["hidden_size"]


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_means_what_it_means_to_transformers(family, sliding):
    settings = {"use_sliding_window": sliding} if family in {"Qwen2", "Qwen3", "SmolLM3"} else {}
    if sliding and family == "SmolLM3":
        settings["sliding_window"] = 7
    if sliding and family.startswith("Qwen"):
        settings["max_window_layers"] = 1
    theirs = transformers_config(family, **BASE, pad_token_id=None, bos_token_id=None, eos_token_id=None, **settings)
    spec = parse(family, **settings)
    layer, window = spec.layers[0], getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert layer.num_kv_heads == theirs.num_key_value_heads
    assert layer.head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert [la.window for la in spec.layers] == [window if t == "sliding_attention" else None for t in types]
    assert spec.config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.config.tied == theirs.tie_word_embeddings
    assert spec.config.norm_eps == theirs.rms_norm_eps
    if family == "SmolLM3":
        assert spec.config.rope_layers == tuple(map(bool, theirs.no_rope_layers))


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 2.0}, LLAMA3, {"rope_type": "yarn", "factor": 4.0}]
)
def test_old_and_new_spelling_of_rotary_parameters_are_one(scaling):
    new = parse(rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5})
    assert parse(rope_theta=500000, rope_scaling=scaling) == new
    if scaling:
        legacy = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
        assert parse(rope_theta=500000, rope_scaling=legacy) == new
        both = {"rope_parameters": {**scaling, "rope_theta": 5e5}, "rope_scaling": scaling}
        assert parse(**both, rope_theta=5e5) == new


def test_null_is_not_absent():
    assert parse("Mistral", sliding_window=None).layers[0].window is None
    assert parse("Mistral").layers[0].window == 4096
    assert parse("Mistral", num_key_value_heads=None).layers[0].num_kv_heads == 32
    assert parse("Mistral").layers[0].num_kv_heads == 8


def test_windows_and_unrotated_layers_per_layer():
    types = ["full_attention", "sliding_attention"] * 2
    qwen = parse("Qwen3", use_sliding_window=True, sliding_window=9, layer_types=types)
    assert [la.window for la in qwen.layers] == [None, 9, None, 9]
    late = parse("Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=3)
    assert [la.window for la in late.layers] == [None, None, None, 9]
    off = parse("Qwen2", use_sliding_window=False, sliding_window=9, max_window_layers=0)
    assert [la.window for la in off.layers] == [None] * 4
    smol = parse("SmolLM3", use_sliding_window=True, sliding_window=9, no_rope_layers=[1, 0, 0, 1, 1])
    assert [la.window for la in smol.layers] == [None, 9, 9, None]
    assert smol.config.rope_layers == (True, False, False, True)


@pytest.mark.parametrize(
    ("family", "settings", "biases"),
    [
        ("Llama", {}, (False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("Mistral", {}, (False, False, False)),
        ("Qwen2", {}, (True, False, False)),
        ("Qwen3", {"attention_bias": True}, (True, True, False)),
        ("SmolLM3", {"mlp_bias": True}, (False, False, True)),
    ],
)
def test_biases(family, settings, biases):
    config = parse(family, **settings).config
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases


def test_token_ids_and_dtype():
    spec = parse(eos_token_id=[2, 5], bos_token_id=1, torch_dtype="bfloat16")
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2, 5), 1, "bfloat16")
    assert parse(dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    bare = parse()
    assert (bare.eos_token_ids, bare.bos_token_id, bare.dtype) == ((), None, "float32")


def test_unknown_keys_are_all_named_with_their_values():
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv = 8\.0, quantization_config = \{'bits': 4\}"):
        parse(quantization_config={"bits": 4}, clip_qkv=8.0)
    with pytest.raises(UnsupportedModelError, match="rope parameters.*mrope_section"):
        parse(rope_scaling={"rope_type": "default", "mrope_section": [1, 2]})


def test_unknown_keys_that_are_null_or_meaningless_pass():
    plain = parse()
    assert parse(quantization_config=None, use_cache=True, transformers_version="4.40.0", pretraining_tp=2) == plain


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Llama", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("Llama", {"hidden_size": "64"}, "hidden_size must be int, not '64'"),
        ("Llama", {"hidden_size": None}, "hidden_size is missing"),
        ("Llama", {"num_hidden_layers": 0}, "num_hidden_layers must be positive, not 0"),
        ("Llama", {"num_hidden_layers": True}, "num_hidden_layers must be int, not True"),
        ("Llama", {"num_attention_heads": 0}, "num_attention_heads must be positive"),
        ("Llama", {"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ("Llama", {"hidden_size": 100}, "hidden_size 100 does not divide over 32 heads"),
        ("Llama", {"head_dim": 15}, "head_dim = 15 must be even"),
        ("Llama", {"head_dim": 0}, "head_dim = 0 must be even and positive"),
        ("Llama", {"vocab_size": -1}, "vocab_size must be positive"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ("Llama", {"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn' is not supported"),
        ("Llama", {"torch_dtype": ["bfloat16"]}, "torch_dtype = .* is not supported"),
        ("Llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ("Llama", {"eos_token_id": [2, True]}, "eos_token_id must be a token id"),
        ("Llama", {"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ("Llama", {"sliding_window": 4}, "sliding_window = 4"),
        ("Llama", {"rope_theta": 0}, "rope_theta must be positive"),
        ("Llama", {"rope_theta": float("inf")}, "rope_theta must be a finite number"),
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("Llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("Llama", {"rope_scaling": [1]}, "must be a table"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive"),
        ("Llama", {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, r"factor = 4\.0 is not supported"),
        ("Llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor = 1.0 must be below"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast must be positive"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1.0}, "must be above 1 for yarn"),
        ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict"),
        ("Mistral", {"sliding_window": 0}, "sliding_window = 0 must be positive"),
        ("Qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 4}, "no window is in use"),
        ("Qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("SmolLM3", {"no_rope_layers": [1, 1]}, "no_rope_layers has 2 entries"),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, "x"]}, "no_rope_layers has 'x'"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be positive"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(family, settings, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse(family, **settings)


def test_a_tied_head_reads_the_embedding_and_ignores_a_head_in_the_checkpoint():
    family = DenseFamily()
    tied, untied = (family.weight_map(parse(tie_word_embeddings=t)) for t in (True, False))
    assert tied.is_ignored("lm_head.weight")
    assert not untied.is_ignored("lm_head.weight")
    sources = {e.param: e.source for e in tied}
    assert sources["lm_head.weight"] == sources["embed.weight"] == "model.embed_tokens.weight"


def test_row_cut_weights_are_declared_so_and_their_biases_are_whole():
    entries = {e.param: e for e in DenseFamily().weight_map(parse(attention_bias=True, mlp_bias=True))}
    dims = {p: entries[f"layers.0.{p}"].shard_dim for p in ("attn.output.weight", "attn.output.bias", "mlp.down.bias")}
    assert dims == {"attn.output.weight": 1, "attn.output.bias": None, "mlp.down.bias": None}
    assert entries["layers.0.attn.qkv.bias"].shard_dim == 0


def test_specs_are_plain_data():
    spec = parse()
    assert evolve(spec, dtype="float16").dtype == "float16"
    assert asdict(spec)["config"]["rope"]["theta"] == 10000.0
