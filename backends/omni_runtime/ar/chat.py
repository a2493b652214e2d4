"""Chat messages to a prompt, by the checkpoint's own template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omni_runtime.errors import Internal, InvalidRequest

# OpenAI's newer name for the system's messages; templates know the old one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ChatTemplate:
    """The template of a tokenizer directory: ``chat_template.jinja``, else that of ``tokenizer_config.json``.

    Raises:
        Internal: there is none, or it is not a template.
    """

    def __init__(self, directory: Path) -> None:
        config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
        source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise Internal(f"{directory} has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise Internal(f"{directory}: the chat template is broken: {error}") from None
        self._special = {
            name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }

    def render(self, messages: Sequence[Any]) -> str:
        """The prompt that asks for the assistant's next message.

        Raises:
            InvalidRequest: a message that is not one, naming ``messages[i].field``, or that the template refuses.
        """
        checked = check_messages(messages)
        try:
            text: str = self._template.render(messages=checked, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template does not take these messages: {error}", param="messages") from None
        return text


def apply_chat_template(directory: Path, messages: Sequence[Any]) -> str:
    """The prompt of ``messages`` by the template in ``directory``; see :meth:`ChatTemplate.render`.

    The template writes the special tokens itself: tokenize its result without adding any.
    """
    return _template(directory).render(messages)


def check_messages(messages: Any) -> list[dict[str, str]]:
    """``messages`` with plain strings as content: parts of type text are joined by line ends.

    Raises:
        InvalidRequest: naming the message and its field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(at: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{at} must be an object with role and content", param=at)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r}", param=f"{at}.role")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise InvalidRequest(f"{at}.{name} is not supported", param=f"{at}.{name}")
    return {"role": _ROLES[role], "content": _content(f"{at}.content", message.get("content"))}


def _content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{at} must be a string or a list of text parts", param=at)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"{at}[{index}] must be a part of type text, not {kind!r}", param=f"{at}[{index}].type"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{at}[{index}].text must be a string", param=f"{at}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)


@lru_cache(maxsize=8)
def _template(directory: Path) -> ChatTemplate:
    return ChatTemplate(directory)


def _token(entry: Any) -> str:
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML, which is not what a model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param="messages")
