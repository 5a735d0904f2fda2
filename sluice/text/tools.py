"""Tools that a model may call, and calls in a chat's history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """One function. ``parameters`` is the text of a JSON schema of an object."""

    name: str
    parameters: str
    description: str | None = None
    strict: bool = False
    given: str = ""  # the whole tool as the client wrote it, JSON; what a template sees

    def fields(self) -> dict[str, Any]:
        """What the template sees."""
        fields: dict[str, Any] = json.loads(self.given)
        return fields

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema


@dataclass(frozen=True)
class Call:
    """One call that the model made. ``arguments`` is a JSON object's text."""

    id: str
    name: str
    arguments: str

    def fields(self) -> dict[str, Any]:
        """What the template sees: arguments as an object when they are one, as in transformers."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        if not isinstance(arguments, dict):
            arguments = self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}
