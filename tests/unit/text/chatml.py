"""A small ChatML template, in the shape of SmolLM2's: a default system turn, then every turn."""

from __future__ import annotations

CHATML = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
