"""Structured logs: JSON lines on stderr, a readable console on a terminal.

Events are short fixed lowercase names with fields. What belongs to one request (`request_id`,
`attempt_id`) or to the whole process (`role`) is bound once and appears on every line of that
context.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

_LEVELS = ("debug", "info", "warning", "error")


def configure(
    role: str, level: str = "info", *, as_json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Set up logging of this process. ``as_json`` None means: unless ``stream`` is a terminal.

    Raises ValueError on an unknown level. Library logs (grpc, uvicorn) go through the same handler.
    """
    if level.lower() not in _LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}")
    out = sys.stderr if stream is None else stream
    json_lines = not out.isatty() if as_json is None else as_json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_render_chain(json_lines)
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # tests configure more than once
    )
    bind(role=role)


def _render_chain(json_lines: bool) -> list[structlog.typing.Processor]:
    chain: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta
    ]
    if json_lines:
        return [
            *chain,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    return [
        *chain,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind(**fields: str) -> None:
    """Add fields to every later line of this task (and of tasks it starts)."""
    structlog.contextvars.bind_contextvars(**fields)
