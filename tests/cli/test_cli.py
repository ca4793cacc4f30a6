"""The command line, in its own process."""

import json
import subprocess
import sys
import tomllib

import pytest


def arbi(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "arbi_core.cli.main", *args], capture_output=True, text=True, timeout=120, **options
    )


def test_help_lists_the_commands():
    result = arbi("--help")
    assert result.returncode == 0
    assert all(c in result.stdout for c in ("serve", "chat", "bench", "plugins", "openapi"))


def test_print_config_is_toml_that_config_reads_back(tmp_path):
    first = arbi("serve", "some/model", "--page-size", "32", "--set", "plugins.gguf.packed=off", "--print-config")
    table = tomllib.loads(first.stdout)
    assert table["model"]["path"] == "some/model"
    assert table["cache"]["page_size"] == 32
    assert table["plugins"]["gguf"]["packed"] == "off"
    assert "# flag --page-size: Tokens per page." in first.stdout
    file = tmp_path / "arbi.toml"
    file.write_text(first.stdout)
    second = arbi("serve", "--config", str(file), "--print-config")
    assert tomllib.loads(second.stdout) == table


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["serve", "--page-size", "0"], "cache.page_size: 0 is too small (at least 1)"),
        (["serve", "--set", "nonsense"], "not of the form NAME=VALUE"),
        (["serve", "--plugins", "ghost"], "no installed plugin is called ghost"),
        (["bench", "demo", "--batch", "x"], "'x' is not a list of whole numbers"),
        (["bench", "demo", "--kv-cache-dtype", "tkv", "--plugins", "gguf"], "pip install arbi-plugin-tkv"),
        (["bench", "demo", "--backend", "paged_kv"], "not of the form kind:name"),
        (["bench", "demo", "--max-model-len", "999999"], "longer than the 8192 tokens"),
        (["bench", "demo", "--max-model-len", "4096", "--num-pages", "10"], "--max-model-len 144"),
    ],
)
def test_bad_settings_end_with_one_line_and_code_1(args, says):
    result = arbi(*args, "--port", "0") if args[0] == "serve" else arbi(*args)
    assert result.returncode == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_usage_ends_with_code_2():
    result = arbi("serve", "--no-such-flag")
    assert result.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in result.stderr


def test_bench_prints_a_table_and_json(tiny_dir):
    args = [
        "bench",
        str(tiny_dir("llama")),
        "--skip-tokenizer-init",
        "--batch",
        "1,2",
        "--input-len",
        "16",
        "--output-len",
        "8",
    ]
    assert "ready after" in arbi(*args).stdout
    report = json.loads(arbi(*args, "--json").stdout)
    assert [r["batch"] for r in report["results"]] == [1, 2]
    assert all(r["ttft_ms"] > 0 and r["tpot_ms"] > 0 for r in report["results"])


def test_openapi_is_printed_without_a_model():
    document = json.loads(arbi("openapi").stdout)
    assert document["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in document["paths"]


def test_chat_answers_and_obeys_its_commands(tiny_text_dir):
    lines = "/help\nhello\n/reset\n/system be brief\nhi\n/quit\n"
    result = arbi("chat", str(tiny_text_dir), "--max-tokens", "5", "--temperature", "0", input=lines)
    assert result.returncode == 0
    assert result.stdout.count("starts over") == 2
    assert "/reset" in result.stdout
    assert "Traceback" not in result.stderr
