"""`titan chat`: talk to a coordinator from a terminal, with Markdown, history and a few commands."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from titan.common.errors import TitanError
from titan.coordinator.chat_view import AnswerView
from titan.coordinator.client import connect, get, stream_chat
from titan.coordinator.stopping import Stoppable

HISTORY = Path("~/.titan/chat_history")
HELP = "/help  /new  /system TEXT  /temperature T  /save FILE  /exit; Ctrl-C stops an answer, Ctrl-D ends"


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
                if line.startswith("/"):
                    if not self.command(line):
                        return
                elif line:
                    self.ask(line)
            except KeyboardInterrupt:  # what was typed is dropped
                self._console.print()
            except EOFError:
                self._console.print()
                return
            except TitanError as error:
                self._complain(str(error))

    def command(self, line: str) -> bool:
        """Do a slash command; False ends the talk."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            self._say(HELP)
        elif name == "/new":
            self._messages.clear()
            self._say("a new conversation")
        elif name == "/system":
            self._system = rest.strip()
            self._say("the system message is set" if self._system else "no system message")
        elif name == "/temperature":
            self._set_temperature(rest)
        elif name == "/save":
            self._save(rest.strip())
        else:
            self._complain(f"there is no command {name}. {HELP}")
        return True

    def _set_temperature(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 2:
            self._complain(f"/temperature needs a number in 0..2; it stays {self._body['temperature']:g}")
            return
        self._body["temperature"] = value
        self._say(f"temperature {value:g}")

    def _save(self, name: str) -> None:
        if not name:
            self._complain("/save needs the name of a file")
            return
        path = Path(name).expanduser()
        text = "\n\n".join(f"## {m['role']}\n\n{m['content']}" for m in self._messages)
        try:
            path.write_text(text + "\n", "utf-8")
        except OSError as error:
            self._complain(f"{name} cannot be written: {error.strerror or error}")
        else:
            self._say(f"saved {len(self._messages)} messages in {path}")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    def _complain(self, text: str) -> None:
        self._console.print(text, style="red", highlight=False, markup=False)

    def ask(self, text: str) -> None:
        """Send a message and show the answer as it comes; Ctrl-C stops it and keeps what there is.

        Raises:
            TitanError: the coordinator is not there or refuses; the message is not part of the conversation then.
        """
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": text}
        stream = stream_chat(self._client, self._body | {"messages": [*system, *self._messages, asked]})
        answer = ""
        view = AnswerView(self._console, plain=self._plain)
        with Stoppable() as stoppable, contextlib.closing(stream), view:
            for chunk in stoppable.items(stream):
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning_content"):
                        view.reason(reasoning)
                    if piece := delta.get("content"):
                        answer += piece
                        view.say(piece)
        if answer:
            self._messages += [asked, {"role": "assistant", "content": answer}]


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
