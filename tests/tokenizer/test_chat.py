"""Chat templates: rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_files import changed, write_folder

from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.errors import MemraError
from memra_runtime.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'model'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|turn>' + message.role + '\n' + message.content + '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\n' }}
{%- endif %}"""
HELLO = [{"role": "user", "content": "Hello"}]


def with_template(template: str | None) -> Tokenizer:
    return load_tokenizer(changed({"tokenizer.chat_template": template}))


def test_messages_are_rendered_and_encoded_with_one_beginning() -> None:
    tokenizer = with_template(TEMPLATE)
    text = "<bos><|turn>user\nHello<turn|>\n<|turn>model\n"
    assert tokenizer.render_chat(HELLO) == text
    ids = tokenizer.encode_chat(HELLO)
    assert ids == tokenizer.encode(text, add_bos=False)
    assert ids.count(2) == 1
    assert ids.count(5) == 2
    bare = with_template(TEMPLATE.replace("{{ bos_token }}", ""))
    assert bare.encode_chat(HELLO) == ids
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False).endswith("<turn|>\n")


def test_blocks_are_trimmed_and_helpers_exist() -> None:
    template = (
        "{% for m in messages %}\n  {% generation %}\n{{ m | tojson }}\n{% endgeneration %}\n"
        "  {% break %}\n{% endfor %}\n{{ extra }} {{ eos_token }} {{ strftime_now('%%') }}"
    )
    rendered = with_template(template).render_chat([{"role": "ü<"}], extra=[1])
    assert rendered == '{"role": "ü<"}\n[1] <eos> %'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "this model has no chat template"),
        (TEMPLATE, "unknown role system"),
        ("{% for %}", "failed, line 1"),
        ("{{ messages.append(1) }}", "failed: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(999999999) %}{% endfor %}", "failed: "),
    ],
)
def test_failures_are_clear(template: str | None, expected: str) -> None:
    with pytest.raises(MemraError) as caught:
        with_template(template).render_chat([{"role": "system", "content": ""}])
    assert "error[chat-template]" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"{{ messages[0].content }}!"},
        {"tokenizer_config.json": {"chat_template": "{{ messages[0].content }}!"}},
        {"tokenizer_config.json": {"chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ messages[0].content }}!"},
        ]}},
    ],
    ids=["jinja", "config", "named"],
)  # fmt: skip
def test_templates_of_a_folder(tmp_path: Path, files: dict[str, object]) -> None:
    with open_checkpoint(write_folder(tmp_path / "m", files)) as checkpoint:
        assert load_tokenizer(checkpoint).render_chat(HELLO) == "Hello!"
