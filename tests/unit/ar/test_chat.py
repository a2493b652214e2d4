"""Messages to a prompt, as transformers makes it, and what is refused."""

import pytest
from omni_runtime.ar.chat import ChatTemplate, apply_chat_template
from omni_runtime.errors import Internal, InvalidRequest


def test_the_prompt_is_that_of_transformers(checkpoint):
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello <b> 'you' \u00e9\n"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    expected = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert apply_chat_template(checkpoint, messages) == expected


def test_text_parts_are_joined_and_developer_is_the_system(checkpoint):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = apply_chat_template(checkpoint, [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}])
    assert found.startswith("<|start|>system\na\nb<|end|>\n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    ],
)
def test_a_bad_message_is_named(checkpoint, messages, param):
    with pytest.raises(InvalidRequest) as caught:
        apply_chat_template(checkpoint, messages)
    assert caught.value.param == param


def test_a_template_may_refuse(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="alternate"):
        ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}])


def test_no_template_and_a_broken_one(tmp_path):
    with pytest.raises(Internal, match="no chat template"):
        ChatTemplate(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(Internal, match="broken"):
        ChatTemplate(tmp_path)
