"""Discovery: what is broken is reported and skipped, what conflicts is refused, what is missing is explained."""

import json
import subprocess
import sys
import types
from importlib import metadata

import pytest
from attrs import frozen

from arbi_core.api import hookimpl
from arbi_core.config.tree import PluginsConfig
from arbi_core.errors import ConfigError, PluginConflictError, PluginError, UnknownNameError, UnsupportedModelError
from arbi_core.plugins import PluginStatus, load_registry


@frozen
class Processor:
    name: str = "p"

    def apply(self, logits, rows):
        return logits


class FakePoint:
    """An entry point of an installed distribution."""

    def __init__(self, name, module, dist="fake-dist"):
        self.name, self.value, self.group = name, f"fake_{name}", "arbi"
        self.dist = types.SimpleNamespace(name=dist, version="1.2")
        if module is not None:
            sys.modules[f"fake_{name}"] = module


@pytest.fixture
def install(monkeypatch):
    """Makes modules look like installed plugins beside the real ones."""
    real = metadata.entry_points
    added = []

    def entry_points(**options):
        return [*real(**options), *added]

    monkeypatch.setattr(metadata, "entry_points", entry_points)

    def add(name, module, dist="fake-dist"):
        added.append(FakePoint(name, module, dist))

    yield add
    for point in added:
        sys.modules.pop(point.value, None)


def plugin(version=1, **hooks):
    module = types.ModuleType("fake")
    if version is not None:
        module.arbi_api_version = version
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def info_of(registry, name):
    return next(p for p in registry.report if p.name == name)


def processors():
    return [Processor()]


def test_working_plugin_is_active_and_its_offer_is_found(install):
    install("good", plugin(arbi_logits_processors=processors))
    registry = load_registry()
    assert registry.logits_processors["p"] == Processor()
    info = info_of(registry, "good")
    assert (info.status, info.distribution, info.version) == (PluginStatus.ACTIVE, "fake-dist", "1.2")
    assert info.offers == ("logits processor p",)


def fail():
    raise RuntimeError("boom")


def misspelt(arbi_unknown_argument):
    return []


BROKEN = {
    "import error": (None, "cannot be imported: ModuleNotFoundError"),
    "wrong version": (plugin(version=99), "hook API version 99; this arbi speaks version 1"),
    "no version": (plugin(version=None), "does not state arbi_api_version"),
    "raising hook": (plugin(arbi_logits_processors=fail), "arbi_logits_processors raised RuntimeError: boom"),
    "no sequence": (plugin(arbi_logits_processors=lambda: 5), "must return a sequence, not 5"),
    "wrong type": (
        plugin(arbi_logits_processors=lambda: ["x"]),
        "'x', which is not a LogitsProcessor; it lacks apply, name",
    ),
    "class for object": (plugin(arbi_logits_processors=lambda: [Processor]), "is not a LogitsProcessor"),
    "empty name": (plugin(arbi_logits_processors=lambda: [Processor("")]), "whose name is ''"),
    "sections": (plugin(arbi_config_sections=lambda: []), "must return a dict of attrs classes"),
    "unknown hook": (plugin(arbi_model_familes=lambda: []), "hooks that do not exist: arbi_model_familes"),
    "bad signature": (plugin(arbi_logits_processors=misspelt), "wrong signature"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plugin_is_reported_and_skipped_and_refused_when_strict(install, kind, caplog):
    module, says = BROKEN[kind]
    install("bad", module)
    install("good", plugin(arbi_logits_processors=processors), dist="other")
    registry = load_registry()
    info = info_of(registry, "bad")
    assert info.status is PluginStatus.BROKEN
    assert says in info.reason
    assert "bad (fake-dist 1.2)" in caplog.text
    assert "p" in registry.logits_processors, "the others go on"
    with pytest.raises(PluginError, match="--strict-plugins refuses"):
        load_registry(PluginsConfig(strict=True))


def test_all_offers_of_a_broken_plugin_are_dropped(install):
    install("half", plugin(arbi_logits_processors=processors, arbi_tool_parsers=fail))
    assert "p" not in load_registry().logits_processors


def test_duplicate_key_names_both_and_a_preference_decides(install):
    install("one", plugin(arbi_logits_processors=processors), dist="dist-one")
    install("two", plugin(arbi_logits_processors=processors), dist="dist-two")
    with pytest.raises(
        PluginConflictError, match=r"'p': one of dist-one and two of dist-two.*--prefer-plugin p=dist-one"
    ):
        load_registry()
    for winner in ("dist-one", "dist-two"):
        assert "p" in load_registry(PluginsConfig(prefer=(f"p={winner}",))).logits_processors
    with pytest.raises(ConfigError, match="key=distribution"):
        load_registry(PluginsConfig(prefer=("p",)))


def test_only_the_named_plugins_are_loaded(install, monkeypatch):
    install("one", plugin(arbi_logits_processors=processors))
    install("two", plugin(arbi_logits_processors=lambda: [Processor("q")]))
    registry = load_registry(PluginsConfig(only=("two",)))
    assert set(registry.logits_processors) >= {"q"}
    assert "p" not in registry.logits_processors
    assert info_of(registry, "one").status is PluginStatus.DISABLED
    assert registry.model_families, "the core's own always load"
    monkeypatch.setenv("ARBI_PLUGINS", "one")
    assert "p" in load_registry().logits_processors
    with pytest.raises(ConfigError, match="no installed plugin is called three"):
        load_registry(PluginsConfig(only=("three",)))


def test_unknown_names_list_what_is_installed():
    registry = load_registry()
    with pytest.raises(
        UnsupportedModelError, match=r"'Gemma3ForCausalLM' .*LlamaForCausalLM.*pip install arbi-plugin-gemma"
    ):
        registry.family("Gemma3ForCausalLM")
    with pytest.raises(UnknownNameError, match=r"the executor 'moon' \(installed: distributed, local\)"):
        registry.pick("executor", registry.executors, "moon")


def test_notifications_that_raise_are_counted_and_harmless(install):
    heard = []
    install("loud", plugin(arbi_engine_built=lambda engine: heard.append(engine)))
    install("sour", plugin(arbi_engine_built=lambda engine: 1 / 0))
    registry = load_registry()
    registry.engine_built("engine")
    assert heard == ["engine"]
    assert registry.notification_errors == {"sour": 1}


def test_commands_of_plugins_join_the_command_line(install, capsys):
    from arbi_core.cli.main import main

    def commands(subparsers):
        parser = subparsers.add_parser("greet", help="say hello")
        parser.set_defaults(run=lambda args: print("hello") or 7)

    install("cli", plugin(arbi_commands=commands))
    assert main(["greet"]) == 7
    assert "hello" in capsys.readouterr().out


def test_objects_can_be_registered_in_process():
    registry = load_registry(extra=[plugin(arbi_logits_processors=processors)])
    assert "p" in registry.logits_processors


def run_cli(*args):
    return subprocess.run(
        [sys.executable, "-m", "arbi_core.cli.main", *args], capture_output=True, text=True, timeout=60
    )


def test_arbi_plugins_shows_what_each_offers():
    result = run_cli("plugins", "--json")
    report = {p["name"]: p for p in json.loads(result.stdout)}
    assert result.returncode == 0
    assert "model family Qwen3ForCausalLM" in report["core-dense"]["offers"]
    assert "checkpoint format gguf" in report["gguf"]["offers"]
    assert "core-dense" in run_cli("plugins").stdout


@pytest.mark.parametrize("args", [["--help"], ["plugins"], ["openapi"], ["serve", "--print-config"]])
def test_light_commands_never_import_torch(args):
    code = f"import sys; from arbi_core.cli.main import main\ntry: main({args})\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_importing_the_package_is_torch_free():
    subprocess.run(
        [sys.executable, "-c", "import sys, arbi_core, arbi_core.api; assert 'torch' not in sys.modules"], check=True
    )
