"""Chat templates: those that take too much memory or time are stopped, and all others render as Jinja does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_ring.api.chat import templates
from mlx_ring.api.chat.request import Conversation
from mlx_ring.api.chat.templates import render
from mlx_ring.core.errors import RequestError
from mlx_ring.head.served_model import prepare_model
from mlx_ring.settings.settings_sources import load_settings

MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 🙂 <b>"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "So."},
    {"role": "user", "content": ""},
]


NESTED = (
    "{% set ns = namespace(l=['x'] * 100) %}{% for i in range(9) %}{% set ns.l = [ns.l] * 100 %}{% endfor %}"
)
"""Start of a template with a list of a few entries, whose text would have 10 to the power of 20 characters."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return prepare_model(load_settings({"model": "demo"})).tokenizer


def rendered(tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", source)
    text = render(tokenizer, Conversation(MESSAGES), add_generation_prompt=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * 'x' }}",
        "{% if false %}{{ 'x' * 9999999999 }}{% endif %}{{ [0] * 9999999999 }}",
        "{{ 10 ** 9999999 }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x' | indent(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ lipsum(n=9999999999) }}",
        "{{ range(999999999) | list }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        NESTED + "{{ ns.l | tojson }}",
        NESTED + "{{ ns.l }}",
        NESTED + "{{ ns.l ~ '' }}",
        "{# " + "x" * (1 << 20) + " #}",
    ],
)
def test_a_template_that_makes_too_much_is_refused(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_MOST_CHARACTERS", 1 << 20)
    with pytest.raises(RequestError, match="chat template rejects these messages: "):
        rendered(tokenizer, source, monkeypatch)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "filtered loops", "output", "macros"],
)
def test_a_template_that_takes_too_long_is_refused(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "_CPU_S", 0.05)
    with pytest.raises(RequestError, match=r"takes more than 0\.05 s of processor time"):
        rendered(tokenizer, source, monkeypatch)
    # The limits are those of one rendering: the next one starts anew.
    assert rendered(tokenizer, "{{ messages | length }}", monkeypatch) == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{% if not loop.last %}\n{% endif %}\n{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index0 ~ ':' ~ m.content ~ none ~ nothing }};{% endfor %}",
        (
            "{% macro show(m) %}[{{ m.role }}{{ caller() if caller else '' }}]{% endmacro %}"
            "{% for m in messages[1:] %}{{ show(m) }}{% call show(m) %}!{% endcall %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(last=0, text='') %}{% for m in messages %}{% set ns.last = ns.last + 1 %}"
            "{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.last * 2 }}{{ ns.text }}{{ 2 ** 5 }}{{ 7 % 4 }}"
        ),
        "{{ '%s-%03d' % (messages[0].role, 7) }}{{ '{:>8}'.format('a') }}{{ '%.2f' | format(1.5) }}{{ '-' * 12 }}",
        "{% for a in range(3) recursive %}{{ a }}{% else %}none{% endfor %}{% for b in [] %}{% else %}empty{% endfor %}",
        "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text | length }}{{ text | upper }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ 'a\nb' | indent(2) }}{{ [1, 2] + [3] }}",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "{{ messages[0] }}{{ (1, [2]) }}{{ none }}{{ nothing }}{{ 1.5 }}{{ {'a': messages | length} | string }}",
        "{{ messages[0] | tojson }}{{ bos_token }}{{ add_generation_prompt }}",
    ],
)
def test_ordinary_templates_render_as_without_limits(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    expected = plain.from_string(source).render(
        messages=MESSAGES, add_generation_prompt=True, **tokenizer._tokenizer.special_tokens_map
    )
    assert rendered(tokenizer, source, monkeypatch) == expected


def test_a_template_s_own_refusal_is_its_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="rejects these messages: roles must alternate"):
        rendered(tokenizer, "{{ raise_exception('roles must alternate') }}", monkeypatch)


def test_the_model_s_own_template_renders_as_without_limits(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tokenizer._tokenizer.chat_template
    from transformers.utils import chat_template_utils as own

    text = rendered(tokenizer, source, monkeypatch)
    compiled: Any = own._cached_compile_jinja_template(source)  # pyright: ignore[reportPrivateUsage]
    assert text == compiled.render(
        messages=MESSAGES, add_generation_prompt=True, **tokenizer._tokenizer.special_tokens_map
    )
