"""The rendered chat is, character by character, what transformers renders."""

import pytest

from arbi_core.loader.base import TokenizerParts
from arbi_core.text.chat import encode_chat, render_chat
from arbi_core.text.tokenizer import Tokenizer
from support.tokenizers import byte_level

pytestmark = pytest.mark.oracle

CHATML = """{%- if tools %}
    {{- '<|system|>\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|assistant|>\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA = (
    "{{ bos_token }}\n{% set ns = namespace(seen=false) %}\n{% for m in messages %}\n"
    "  {% if loop.first and m['role'] == 'system' %}\n<<SYS>>{{ m['content'] | trim }}<</SYS>>\n"
    "  {% else %}\n[{{ loop.index0 }}/{{ loop.length }}] {{ m['content'] }}{{ eos_token if loop.last }}\n  {% endif %}\n"
    "{% generation %}\n{% set ns.seen = true %}\n{% endgeneration %}\n{% endfor %}{{ ns.seen }}{{ pad_token }}\n"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é & 'ü'>", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln", "n": 1.0}}}
CHATS = {
    "plain": [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi\n"}],
    "tools": [
        {"role": "user", "content": "wéather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ],
}


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_and_encoding_match(template, chat, options, prompt):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    ours = Tokenizer(TokenizerParts(byte_level(), "<s>", "</s>", {"default": template}, {"pad_token": "<pad>"}))
    variables = {k: v for k, v in options.items() if k != "tools"}
    given = {"add_generation_prompt": prompt, "tools": options.get("tools"), "variables": variables}
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **options)
    assert render_chat(ours, chat, **given) == text
    ids = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=prompt, return_dict=False, **options)
    assert encode_chat(ours, chat, **given) == ids
