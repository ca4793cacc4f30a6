"""The configuration tree: precedence, types, ranges, and errors that name field and fix."""

import pytest

from arbi_core.config.load import from_values, resolve, settings
from arbi_core.config.tree import CacheConfig, ModelConfig, ServerConfig
from arbi_core.errors import ConfigError


def test_flags_win_over_the_file_and_the_file_over_the_environment(tmp_path):
    file = tmp_path / "arbi.toml"
    file.write_text('[cache]\npage_size = 32\nkv_dtype = "bf16"\n')
    environment = {"ARBI_CACHE__PAGE_SIZE": "64", "ARBI_CACHE__KV_DTYPE": "fp16", "ARBI_SERVER__PORT": "9000"}
    resolved = resolve({"cache.page_size": "8"}, file=file, environment=environment)
    assert resolved.config.cache == CacheConfig(page_size=8, kv_dtype="bf16")
    assert resolved.config.server.port == 9000
    assert resolved.origins == {
        "cache.page_size": "flag --page-size",
        "cache.kv_dtype": f"file {file}",
        "server.port": "environment ARBI_SERVER__PORT",
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cache.enable_prefix_caching", "off", False),
        ("cache.cpu_kv_gib", "0.5", 0.5),
        ("cache.backends", "paged_kv:a,gdn:b", ("paged_kv:a", "gdn:b")),
        ("model.max_model_len", "4096", 4096),
        ("model.tokenizer", "x", "x"),
    ],
)
def test_text_becomes_the_type_of_the_field(name, text, value):
    section, _, field = name.partition(".")
    assert getattr(getattr(resolve({name: text}, environment={}).config, section), field) == value


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("cache.page_size", "many", r"cache.page_size: 'many' is not a whole number \(flag --page-size\)"),
        ("cache.page_size", "0", r"cache.page_size: 0 is too small \(at least 1\)"),
        ("cache.enable_prefix_caching", "maybe", "is not true or false"),
        ("model.dtype", "int3", r"model.dtype: 'int3' is not one of the choices \(one of: auto, float32"),
        ("server.port", "70000", "too large"),
        ("cache.pagesize", "3", r"there is no such setting \(flag\).*did you mean cache.page_size"),
    ],
)
def test_bad_flags_name_field_source_and_fix(name, value, says):
    with pytest.raises(ConfigError, match=says):
        resolve({name: value}, environment={})


def test_bad_files_and_variables_are_named(tmp_path):
    file = tmp_path / "arbi.toml"
    file.write_text("[cache]\npage_sise = 3")
    with pytest.raises(ConfigError, match=r"cache.page_sise: there is no such setting \(file .*arbi.toml\)"):
        resolve({}, file=file, environment={})
    file.write_text("[cache\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve({}, file=file, environment={})
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, file=tmp_path / "none.toml", environment={})
    file.write_text("[cache]\npage_size = true")
    with pytest.raises(ConfigError, match="True is not a whole number"):
        resolve({}, file=file, environment={})
    with pytest.raises(ConfigError, match="ARBI_CACHE__PAGESIZE"):
        resolve({}, environment={"ARBI_CACHE__PAGESIZE": "3"})


def test_plugin_sections_are_part_of_the_tree():
    from arbi_plugin_gguf.config import GgufConfig

    sections = {"gguf": GgufConfig}
    assert (
        resolve({"plugins.gguf.packed": "off"}, environment={}, sections=sections).config.plugins["gguf"].packed
        == "off"
    )
    with pytest.raises(ConfigError, match="plugins.gguf.packed: 'half' is not one of the choices"):
        resolve({"plugins.gguf.packed": "half"}, environment={}, sections=sections)
    assert from_values({"plugins": {"gguf": {"packed": "off"}}}).plugins["gguf"].packed == "off"
    with pytest.raises(ConfigError, match="plugins.gguf.paked: there is no such setting"):
        from_values({"plugins": {"gguf": {"paked": "off"}}})
    with pytest.raises(ConfigError, match="no installed plugin has this section"):
        from_values({"plugins": {"gone": {}}})


def test_every_setting_has_a_help_text_and_flags_are_unique():
    everything = list(settings())
    assert all(s.help for s in everything)
    assert len({s.flag for s in everything}) == len(everything)
    assert len({s.env for s in everything}) == len(everything)


def test_python_values_are_checked_like_the_others():
    base = ServerConfig(model=ModelConfig(seed=5))
    config = from_values({"cache.page_size": 4, "model.path": "x"}, base=base)
    assert (config.cache.page_size, config.model.seed, config.model.path) == (4, 5, "x")
    with pytest.raises(ConfigError, match="'4' is not a whole number|cache.page_size"):
        from_values({"cache.page_size": 4.5})
