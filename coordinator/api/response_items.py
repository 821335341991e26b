"""The output items of a response, and the events that tell of their growth. Pure but for what it has collected."""

from __future__ import annotations

import uuid
from typing import Any

from titan.coordinator.api.reading import Part, Reasoning, ToolCall

__all__ = ["Items"]


class Items:
    """Parts of an answer as items: a message's text, reasoning, calls. One item is open at a time."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def take(self, part: Part) -> list[dict[str, Any]]:
        """Take a part, return its events."""
        if isinstance(part, ToolCall):
            return [*self.close(), *self._call(part)]
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        events: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != kind:
            events.extend(self.close())
            events.extend(self._begin(kind))
        self._text += part.text
        events.append(self._about(f"response.{_content(kind)}.delta", delta=part.text))
        return events

    def close(self) -> list[dict[str, Any]]:
        """End the open item."""
        item = self._open
        if item is None:
            return []
        kind = item["type"]
        part = _part(kind, self._text)
        events = [
            self._about(f"response.{_content(kind)}.done", text=self._text),
            self._about("response.content_part.done", part=part),
        ]
        item["content"] = [part]
        item["status"] = "completed"
        events.append(self._item_event("response.output_item.done", item))
        self.done.append(item)
        self._open = None
        return events

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        prefix = "msg" if kind == "message" else "rs"
        item: dict[str, Any] = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        item["content"] = []
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open, self._text = item, ""
        added = self._item_event("response.output_item.added", item)
        return [added, self._about("response.content_part.added", part=_part(kind, ""))]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        about = {"item_id": item["id"], "output_index": len(self.done)}
        events = [self._item_event("response.output_item.added", item)]
        item = item | {"arguments": call.arguments, "status": "completed"}
        events += [
            {"type": "response.function_call_arguments.delta", "delta": call.arguments} | about,
            {"type": "response.function_call_arguments.done", "name": call.name, "arguments": call.arguments} | about,
            self._item_event("response.output_item.done", item),
        ]
        self.done.append(item)
        return events

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.done), "item": dict(item)}

    def _about(self, kind: str, **values: Any) -> dict[str, Any]:
        assert self._open is not None
        event = {"type": kind, "item_id": self._open["id"], "output_index": len(self.done), "content_index": 0} | values
        return event | {"logprobs": []} if "output_text" in kind else event


def _content(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
