"""Several clients of several protocols, as processes, at one coordinator process, while a worker dies.

Run: `.venv/bin/pytest tests/cluster/test_serving.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fixtures.processes import CoordinatorProcess, write_hosts

from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.reference import reference_tokens
from titan.deploy import DEMO_MODEL

SCENES = [f"SCENE {i}. A street.\n\n[Enter {name}.]\n\n" for i, name in enumerate(("ROMEO", "HAMLET", "A GHOST"))]
FAST = {"timeouts": {"execute": "300ms", "readmit": "100ms", "readmit_max": "500ms", "connect": "1s", "hello": "2s"}}
DEADLINE_S = 60
TOKENS = 48
OPENAI = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=60)
stream = client.chat.completions.create(model="default", messages=[{"role": "user", "content": sys.argv[2]}],
                                        max_tokens=40, temperature=0, stream=True)
print("".join(c.delta.content or "" for chunk in stream for c in chunk.choices), end="")
"""
ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
with client.messages.stream(model="default", messages=[{"role": "user", "content": sys.argv[2]}],
                            max_tokens=40, extra_body={"temperature": 0}) as stream:
    print("".join(stream.text_stream), end="")
"""


@pytest.fixture
def duo() -> Iterator[LoopbackCluster]:
    with LoopbackCluster(DEMO_MODEL, settings=FAST) as loopback:
        yield loopback


def client(program: str, url: str, text: str) -> str:
    command = [sys.executable, "-c", program, url, text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl(url: str, body: dict[str, Any]) -> dict[str, Any]:
    command = [
        "curl",
        "--silent",
        "--max-time",
        str(DEADLINE_S),
        "-H",
        "Content-Type: application/json",
        "-d",
        "@-",
        url,
    ]
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_clients_get_mlx_lms_tokens_while_a_worker_dies(duo: LoopbackCluster) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(DEMO_MODEL)
    expected = [tokenizer.decode(reference_tokens(DEMO_MODEL, tokenizer.encode(s), TOKENS)) for s in SCENES]
    hosts = write_hosts(duo.folder / "hosts.yaml", duo.hosts)
    with CoordinatorProcess(hosts, "--prompt-cache-disk", "0B") as coordinator:
        url = coordinator.wait_until_ready()
        base = url.removesuffix("/v1")
        asked = {"model": "default", "max_tokens": TOKENS, "temperature": 0}
        talk = "Who art thou?"
        alone = client(OPENAI, base, talk)
        assert client(ANTHROPIC, base, talk) == alone
        with ThreadPoolExecutor(8) as pool:
            texts = [pool.submit(curl, f"{base}/v1/completions", asked | {"prompt": SCENES[i % 3]}) for i in range(6)]
            talks = [pool.submit(client, program, base, talk) for program in (OPENAI, ANTHROPIC)]
            duo.workers[0].kill()
            for i, text in enumerate(texts):
                assert text.result(DEADLINE_S)["choices"][0]["text"] == expected[i % 3]
            for told in talks:
                assert told.result(DEADLINE_S) == alone
        refused = curl(f"{base}/v1/messages", {"model": "default", "messages": [], "max_tokens": 4})
        assert refused["error"]["type"] == "invalid_request_error"
        state = httpx.get(f"{base}/v1/titan/cluster", timeout=10).json()
        assert state["engine"]["failed"] == 0
        assert {w["name"]: w["state"] for w in state["workers"]}[duo.workers[0].name] != "ready"
        assert sum(state["executed"]["remote"].values()) > 0
        assert "titan_worker_state" in httpx.get(f"{base}/metrics", timeout=10).text
        assert coordinator.stop() == 0


def test_curl_is_here() -> None:
    assert shutil.which("curl")
