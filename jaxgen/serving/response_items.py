"""The output of a response: items that open, grow and close, and the events that tell of it."""

import uuid
from typing import Any

from jaxgen.serving.parsers import Event, Reasoning, Text, ToolCall
from jaxgen.serving.tools import new_call_id

type Told = tuple[str, dict[str, Any]]
"""An event's type, and its members."""


class Items:
    """done: the items that are complete. At most one is open, and grows."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []

    def take(self, event: Event) -> list[Told]:
        """Grows by one event; what that is told as."""
        match event:
            case Text(text):
                told = self._need("message")
            case Reasoning(text):
                told = self._need("reasoning")
            case ToolCall(_, name):
                told = [*self.close(), *self._begin("function_call", name)]
                text = ""
            case _:
                told, text = [], event.text
        if text:
            self._text.append(text)
            told.append((self._kind("delta"), {**self._place(), "delta": text}))
        return told

    def close(self) -> list[Told]:
        """Ends the item that is open, if one is."""
        item = self._open
        if item is None:
            return []
        text, told = "".join(self._text), []
        if item["type"] == "function_call":
            item["arguments"] = text
            whole = {"arguments": text, "name": item["name"]}
            told.append((self._kind("done"), {**self._place(), **whole}))
        else:
            part = self._part(text)
            item["content"] = [part]
            told.append((self._kind("done"), {**self._place(), "text": text}))
            told.append(("response.content_part.done", {**self._place(), "part": part}))
        item["status"] = "completed"
        self.done.append(item)
        self._open, self._text = None, []
        place = {"output_index": len(self.done) - 1, "item": item}
        return [*told, ("response.output_item.done", place)]

    def _need(self, kind: str) -> list[Told]:
        if self._open is not None and self._open["type"] == kind:
            return []
        return [*self.close(), *self._begin(kind)]

    def _begin(self, kind: str, name: str = "") -> list[Told]:
        short = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{short}_{uuid.uuid4().hex}", "type": kind}
        item["status"] = "in_progress"
        if kind == "function_call":
            item |= {"call_id": new_call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._open = item
        place = {"output_index": len(self.done), "item": dict(item)}
        told: list[Told] = [("response.output_item.added", place)]
        if kind != "function_call":
            told.append(("response.content_part.added", {**self._place(), "part": self._part("")}))
        return told

    def _kind(self, what: str) -> str:
        assert self._open is not None
        names = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }
        return f"response.{names[self._open['type']]}.{what}"

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place: dict[str, Any] = {"item_id": self._open["id"], "output_index": len(self.done)}
        if self._open["type"] == "function_call":
            return place
        place["content_index"] = 0
        if self._open["type"] == "message":
            place["logprobs"] = []
        return place
