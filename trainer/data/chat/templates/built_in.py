"""Chat templates for tokenizers that bring none."""

# Every turn between two tokens. A tokenizer that lacks them spells them out, and its end-of-text
# token follows the last turn.
_CHATML = """\
{%- if tools %}{{ raise_exception('chatml knows no tools') }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception('chatml knows no tool calls') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Roles in words, for any tokenizer: its end-of-text token ends every answer.
_PLAIN = """\
{%- if tools %}{{ raise_exception('plain knows no tools') }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{{ raise_exception('plain knows no tool calls') }}{% endif %}
{{- message.role | capitalize + ': ' + message.content | trim }}
{%- if message.role == 'assistant' %}{{- eos_token }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}"""

BUILT_IN = {"chatml": _CHATML, "plain": _PLAIN}


def legal() -> str:
    """What data.chat_template may be, for messages."""
    return f"a file of Jinja, or the name of a built-in one ({', '.join(BUILT_IN)})"
