"""What is decided before any rank starts: places, fitting sizes, and the configuration on its way."""

import json

import attrs
import pytest

from arbi_core.config.tree import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from arbi_core.distributed.config_json import check_same, config_to_json, policy_from_json, read_config
from arbi_core.distributed.fit import check_fit, fitting_sizes
from arbi_core.distributed.launch import Place, torchrun_place
from arbi_core.errors import ConfigError
from arbi_core.plugins import load_registry
from arbi_core.spec import LayerSpec, ModelDims, ModelSpec, StateKind

CONFIG = ServerConfig(
    model=ModelConfig(path="/models/one", max_model_len=100),
    cache=CacheConfig(backends=("paged_kv:reference",), host_tier_gib=1.5),
    scheduler=SchedulerConfig(tensor_parallel_size=4, tenant_limits=("a:weight=2",)),
)


def spec(*heads):
    layers = tuple(LayerSpec(i, num_heads=q, num_kv_heads=kv, head_dim=64) for i, (q, kv) in enumerate(heads))
    return ModelSpec("LlamaForCausalLM", ModelDims(len(layers), 64, 100, 100), layers)


def test_a_configuration_survives_the_way():
    data = json.loads(json.dumps(config_to_json(CONFIG)))
    assert read_config(data, load_registry(policy_from_json(data))) == CONFIG


def test_a_plugin_section_survives_the_way():
    @attrs.frozen
    class Codec:
        bits: int = 4
        names: tuple[str, ...] = ()

    registry = attrs.evolve(load_registry(), config_sections={"codec": Codec})
    config = attrs.evolve(CONFIG, plugins={"codec": Codec(3, ("a", "b"))})
    data = json.loads(json.dumps(config_to_json(config)))
    assert read_config(data, registry) == config
    with pytest.raises(ConfigError, match="no plugin with this section is installed on this rank"):
        read_config(data, load_registry())


def test_settings_that_differ_between_ranks_are_named():
    other = attrs.evolve(CONFIG, scheduler=attrs.evolve(CONFIG.scheduler, max_num_seqs=7))
    with pytest.raises(ConfigError, match="scheduler.max_num_seqs: rank 3 was started with 7, rank 0 with 256"):
        check_same(config_to_json(other), config_to_json(CONFIG), 3)


def test_hosts_may_keep_the_model_in_different_places():
    other = attrs.evolve(CONFIG, model=attrs.evolve(CONFIG.model, path="/elsewhere"))
    check_same(config_to_json(other), config_to_json(CONFIG), 3)


def test_sizes_that_fit_divide_query_and_key_value_heads():
    assert fitting_sizes(spec((32, 8), (32, 4))) == [1, 2, 4]
    assert fitting_sizes(spec((32, 8))) == [1, 2, 4, 8]
    check_fit(spec((32, 8)), 8)
    check_fit(spec((9, 3)), 1)


@pytest.mark.parametrize("size", [3, 16])
def test_a_size_that_does_not_fit_is_refused_with_those_that_would(size):
    message = (
        rf"{size} ranks cannot share the 32 query and 8 key/value heads of LlamaForCausalLM \(--tp 1 or 2 or 4 or 8\)"
    )
    with pytest.raises(ConfigError, match=message):
        check_fit(spec((32, 8)), size)


def test_layers_without_heads_do_not_matter():
    layers = (LayerSpec(0, state_kind=StateKind("gdn")), *spec((8, 4)).layers)
    assert fitting_sizes(attrs.evolve(spec((8, 4)), layers=layers)) == [1, 2, 4]


ENV = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_torchrun_says_where_a_process_stands():
    assert torchrun_place(ENV) == Place(rank=2, size=4, device_index=1)


@pytest.mark.parametrize("missing", sorted(ENV))
def test_half_of_torchrun_is_not_torchrun(missing):
    assert torchrun_place({k: v for k, v in ENV.items() if k != missing}) is None


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}])
def test_places_that_make_no_sense_are_refused(change):
    with pytest.raises(ConfigError):
        torchrun_place({**ENV, **change})
