"""The demo as a newcomer sees it: the real command in its own process, the real model, the real client."""

import signal
import subprocess
import sys

import openai
import pytest

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def demo():
    command = [
        sys.executable,
        "-m",
        "arbi_core.cli.main",
        "serve",
        "--port",
        "0",
        "--ask",
        "What is the capital of France?",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    yield process, line
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_demo_prints_a_curl_line_that_names_its_address(demo):
    _, line = demo
    assert line.startswith("curl http://127.0.0.1:")
    assert "/v1/chat/completions" in line


def test_demo_answers_and_streams(demo):
    url = demo[1].split()[1].removesuffix("/chat/completions")
    client = openai.OpenAI(base_url=url, api_key="none")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    stream = client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=32, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == answer.choices[0].message.content
    again = client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=32)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_demo_stops_cleanly_and_has_answered_on_the_terminal(demo):
    process, _ = demo
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Paris" in errors
    assert "Traceback" not in errors
