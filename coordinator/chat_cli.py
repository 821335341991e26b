"""`titan chat`: talk to a coordinator from a terminal, with Markdown, history and a few commands."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from titan.common.errors import TitanError
from titan.coordinator.client import connect, get, stream_chat

HISTORY = Path("~/.titan/chat_history")
HELP = "/help  /new  /system TEXT  /temperature T  /save FILE  /exit; Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    app.command("chat")(chat)


def chat(
    url: Annotated[str, typer.Option(help="The coordinator's HTTP address.")] = "http://127.0.0.1:8080",
    key_file: Annotated[Path | None, typer.Option(help="A file with an API key.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print text as it comes, without Markdown.")] = False,
) -> None:
    """Talk to the model. Reads standard input when it is no terminal: one message, one answer."""
    console = Console()
    with connect(url, key_file) as client:
        model = get(client, "/v1/models")["data"][0]["id"]
        talk = _Talk(client, console, model, temperature, max_tokens, system, plain or not console.is_terminal)
        if not sys.stdin.isatty():
            talk.ask(sys.stdin.read())
            return
        console.print(f"[bold]{model}[/] at {url}. {HELP}", highlight=False)
        with _history():
            talk.loop()


class _Talk:
    def __init__(
        self,
        client: Any,
        console: Console,
        model: str,
        temperature: float,
        max_tokens: int | None,
        system: str,
        plain: bool,
    ) -> None:
        self._client, self._console, self._plain = client, console, plain
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._system = system
        self._messages: list[dict[str, str]] = []

    def loop(self) -> None:
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                try:
                    self.ask(line)
                except TitanError as error:
                    self._messages.pop()
                    self._console.print(str(error), style="red", highlight=False, markup=False)

    def command(self, line: str) -> bool:
        """Do a slash command; False ends the talk."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/new":
            self._messages.clear()
        elif name == "/system":
            self._system = rest
        elif name == "/temperature":
            with contextlib.suppress(ValueError):
                self._body["temperature"] = float(rest)
        elif name == "/save" and rest:
            text = "\n\n".join(f"## {m['role']}\n\n{m['content']}" for m in self._messages)
            try:
                Path(rest).expanduser().write_text(text + "\n", "utf-8")
            except OSError as error:
                self._console.print(f"{rest} cannot be written: {error}", style="red", markup=False)
        else:
            self._console.print(HELP, highlight=False)
        return True

    def ask(self, text: str) -> None:
        """Send a message and show the answer as it comes; Ctrl-C stops it and keeps what there is."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer = ""
        stream = stream_chat(self._client, self._body | {"messages": system + self._messages})
        live = None if self._plain else Live(console=self._console, refresh_per_second=8, vertical_overflow="visible")
        with contextlib.closing(stream), live or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
            for chunk in stream:
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    if live is None:
                        self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
                    else:
                        live.update(Markdown(answer))
        if live is None:
            self._console.print()
        self._messages.append({"role": "assistant", "content": answer})


@contextlib.contextmanager
def _history():
    """Earlier lines with the arrow keys, where readline is there."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = HISTORY.expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.touch(mode=0o600)
            readline.write_history_file(path)
