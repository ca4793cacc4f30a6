"""Writes small GGUF files."""

import gguf
import numpy as np

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HIDDEN, INTER, VOCAB, LAYERS, HEADS, KV = 256, 512, 320, 2, 4, 2
TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(VOCAB - 3))]


def packed(rng, kind, rows, cols, scale=0.05):
    """Random rows of a type: quantised by the package where it can, else random codes with sane scales."""
    qtype = gguf.GGMLQuantizationType[kind]
    values = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
    try:
        return gguf.quants.quantize(values, qtype), qtype
    except NotImplementedError:
        pass
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    halves = np.array([0.001, 0.002], dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[..., -2:] = halves[:2]
    else:
        raw[..., :4] = halves
    return raw.reshape(rows, -1), qtype


def permute(rows, heads):
    """What converters do to llama's q and k: rows of a head interleaved for pairwise rotation."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write_model(path, kind="F32", *, arch="llama", seed=0, skip=(), extra=(), metadata=None):
    """A whole tiny model; returns the dense weights by Hugging Face name."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    dense = {}

    def add(name, hf, rows, cols, heads=None):
        raw, qtype = packed(rng, kind, rows, cols)
        dense[hf] = gguf.quants.dequantize(raw, qtype).reshape(rows, cols)
        if name not in skip:
            stored = raw if heads is None else permute(raw, heads)
            writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=qtype)

    def add_norm(name, hf, size):
        dense[hf] = rng.uniform(0.5, 1.5, size).astype(np.float32)
        if name not in skip:
            writer.add_tensor(name, dense[hf])

    head = HIDDEN // HEADS
    add("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN)
    add_norm("output_norm.weight", "model.norm.weight", HIDDEN)
    interleaved = arch in {"llama", "smollm3"}
    for i in range(LAYERS):
        here, there = f"blk.{i}", f"model.layers.{i}"
        add_norm(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", HIDDEN)
        add_norm(f"{here}.ffn_norm.weight", f"{there}.post_attention_layernorm.weight", HIDDEN)
        add(f"{here}.attn_q.weight", f"{there}.self_attn.q_proj.weight", HIDDEN, HIDDEN, HEADS if interleaved else None)
        add(f"{here}.attn_k.weight", f"{there}.self_attn.k_proj.weight", KV * head, HIDDEN, KV if interleaved else None)
        add(f"{here}.attn_v.weight", f"{there}.self_attn.v_proj.weight", KV * head, HIDDEN)
        add(f"{here}.attn_output.weight", f"{there}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{here}.ffn_gate.weight", f"{there}.mlp.gate_proj.weight", INTER, HIDDEN)
        add(f"{here}.ffn_up.weight", f"{there}.mlp.up_proj.weight", INTER, HIDDEN)
        add(f"{here}.ffn_down.weight", f"{there}.mlp.down_proj.weight", HIDDEN, INTER)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense
