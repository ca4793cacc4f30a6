"""The example plugin, really installed: a virtual environment of its own, pip, the offline API, the server."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

import httpx
import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_plugin"
CONFIG = {
    "architectures": ["ExampleForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that sees this one's packages, with the example installed by pip on top."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*/site-packages"))
    own = [p for p in sys.path if p.endswith("site-packages")]
    # `addsitedir`, so that editable installs of the outer environment work in the inner one too.
    (site / "outer.pth").write_text("\n".join(f"import site; site.addsitedir({p!r})" for p in own))
    python = home / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        str(EXAMPLE),
    ]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=120)
    return python


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("example_model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def run(python, *args):
    return subprocess.run([python, *args], capture_output=True, text=True, timeout=120, check=True).stdout


def test_installed_plugin_is_listed_with_its_offers(environment):
    report = {p["name"]: p for p in json.loads(run(environment, "-m", "arbi_core.cli.main", "plugins", "--json"))}
    assert report["example"]["distribution"] == "arbi-plugin-example"
    assert report["example"]["offers"] == [
        "attention backend paged_kv:example",
        "model family ExampleForCausalLM",
        "route /example/finished",
        "config section plugins.example",
    ]


def test_installed_command_runs(environment):
    assert run(environment, "-m", "arbi_core.cli.main", "greet").strip() == "hello"


def test_installed_plugin_generates_offline(environment, model):
    script = textwrap.dedent("""
        import sys
        from arbi_core import LLM, SamplingParams
        llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, backends=("paged_kv:example",), num_pages=64)
        params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
        print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids)
    """)
    assert len(json.loads(run(environment, "-c", script, str(model)))) == 7


def test_plugins_own_tests_pass_where_it_is_installed(environment):
    run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"))


def test_installed_plugin_serves_over_http(environment, model):
    command = [
        environment, "-m", "arbi_core.cli.main", "serve", str(model), "--load-format", "dummy", "--skip-tokenizer-init",
        "--backend", "paged_kv:example", "--port", "0", "--num-pages", "64",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        line = process.stdout.readline()
        url = line.split()[1].removesuffix("/v1/chat/completions")
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}, timeout=30
        )
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["token_ids"]) == 4
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/example/finished").json()["finished"] < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert httpx.get(f"{url}/example/finished").json() == {"finished": 1}
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
