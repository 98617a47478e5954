"""A chat completion request in the making, from the body of another API.

Knows chat.py's parameters, no other API.  Invariant: an error that chat.py finds names the field of the other API that
the value came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from lucevisor.api.errors import ApiError
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.chat import count_prompt, read_chat

_Result = TypeVar("_Result")
_INDEXED: Final = re.compile(r"(messages|tools)\[(\d+)\]")


@dataclass(slots=True)
class ChatDraft:
    """`origins`: where each message and tool comes from, by list; `unused`: fields without effect."""

    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, list[str]] = field(default_factory=lambda: {"messages": [], "tools": []})
    unused: list[str] = field(default_factory=list)

    def add_message(self, message: dict[str, Any], origin: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.origins["messages"].append(origin)

    def add_tool(self, function: dict[str, Any], origin: str) -> None:
        """Append a tool, given its function; fields that are None are left out."""
        kept = {name: value for name, value in function.items() if value is not None}
        self.tools.append({"type": "function", "function": kept})
        self.origins["tools"].append(origin)

    def keep_tools(self, names: Collection[object]) -> None:
        """Drop the tools with other names."""
        kept = [i for i, tool in enumerate(self.tools) if tool["function"]["name"] in names]
        self.tools = [self.tools[i] for i in kept]
        self.origins["tools"] = [self.origins["tools"][i] for i in kept]

    def read(self, ports: Ports, names: Mapping[str, str]) -> PreparedRequest:
        """Prepare the request; `names`: where chat parameters come from.  Raises ApiError with the field's own name."""
        return self._read(read_chat, ports, names)

    def count(self, ports: Ports, names: Mapping[str, str]) -> int:
        """Return how many tokens the prompt has, also beyond the context; otherwise as `read`."""
        return self._read(count_prompt, ports, names)

    def _read(
        self, reader: Callable[[dict[str, Any], Ports], _Result], ports: Ports, names: Mapping[str, str]
    ) -> _Result:
        try:
            return reader({**self.fields, "messages": self.messages, "tools": self.tools or None}, ports)
        except ApiError as error:
            raise error.renamed(self._origin(error.param or "", names)) from None

    def _origin(self, param: str, names: Mapping[str, str]) -> str:
        if found := _INDEXED.match(param):
            rest = param[found.end() :]
            return self.origins[found[1]][int(found[2])] + rest.removeprefix(".content").replace(".function", "", 1)
        for chat_name, name in names.items():
            if param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}[")):
                return name + param[len(chat_name) :]
        return param
