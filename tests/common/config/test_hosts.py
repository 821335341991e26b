"""Run: `.venv/bin/pytest tests/common/config/test_hosts.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from titan.common.config import HostsConfig, load_hosts, read_api_key
from titan.common.errors import ConfigError

FULL = """\
model: models/olmoe
coordinator:
  name: desk
  memory: 8GiB
  listen: 0.0.0.0:9000
  api_key_file: key
workers:
  - name: mini
    addresses: [Mini.local, "10.0.0.2:7078", "[::1]"]
    memory: 12GB
  - {name: studio, addresses: ["studio.local:7077"]}
tls: {ca: /etc/titan/ca.pem, cert: desk.pem}
timeouts:
  execute: 250ms
  readmit: 2s
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(text)
    return path


def _key(folder: Path, content: str = "k" * 32, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(content)
    path.chmod(mode)
    return path


def _problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_hosts(_write(folder, text))
    return [line.strip() for line in str(caught.value).splitlines()]


def test_a_full_file_becomes_values(tmp_path: Path) -> None:
    _key(tmp_path)
    (tmp_path / "models/olmoe").mkdir(parents=True)
    config = load_hosts(_write(tmp_path, FULL))
    assert config.model == tmp_path / "models/olmoe"
    assert config.coordinator.name == "desk"
    assert config.coordinator.memory == 8 << 30
    assert config.coordinator.listen == "0.0.0.0:9000"
    assert config.coordinator.api_key_file == tmp_path / "key"
    mini, studio = config.workers
    assert mini.addresses == ("mini.local:7077", "10.0.0.2:7078", "[::1]:7077")
    assert (mini.memory, studio.memory) == (12_000_000_000, None)
    assert config.worker("studio") is studio
    assert config.tls.ca == Path("/etc/titan/ca.pem")
    assert config.tls.cert == tmp_path / "desk.pem"
    assert config.tls.key == tmp_path / "certs/coordinator.key"
    assert (config.timeouts.execute, config.timeouts.readmit, config.timeouts.readmit_max) == (0.25, 2.0, 30.0)


@pytest.mark.parametrize("rest", ["", "coordinator:\nworkers:\ntls:\ntimeouts:\n", "workers: []\n"])
def test_the_smallest_file_has_defaults(tmp_path: Path, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_hosts(_write(tmp_path, f"model: ~/olmoe\n{rest}"))
    assert config.model == Path("/home/me/olmoe")
    assert config.workers == ()
    assert config.coordinator.listen == "127.0.0.1:8080"
    assert config.tls.cert == tmp_path / "certs/coordinator.pem"
    assert config.timeouts.connect == 2.0
    with pytest.raises(KeyError):
        config.worker("mini")


def test_a_relative_path_to_the_file_counts_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    _write(tmp_path / "conf", "model: ../olmoe")
    monkeypatch.chdir(tmp_path)
    assert load_hosts("conf/hosts.yaml").model == tmp_path / "olmoe"


def test_every_problem_is_listed_with_its_line(tmp_path: Path) -> None:
    first, *rows = _problems(
        tmp_path,
        """\
modle: x
coordinator:
  memroy: 8GiB
  memory: 8G
  listen: 0.0.0.0:8080
workers:
  - name: mini
    addresses: [mini.local, "10.0.0.2:99999"]
  - {name: mini, addresses: ["MINI.local:7077"]}
  - {name: Stu dio, addresses: x, colour: red}
  - z
timeouts:
  connect: 5h
  connect: 2s
  hello:
  readmit_max: 500ms
tls: []
""",
    )
    assert first == f"{tmp_path / 'hosts.yaml'} has 16 problems:"
    starts = [
        "hosts.yaml:1: model: is missing",
        "hosts.yaml:1: modle: unknown key; did you mean 'model'?",
        "hosts.yaml:2: coordinator.api_key_file: is missing, and listen: 0.0.0.0:8080 can be reached",
        "hosts.yaml:3: coordinator.memroy: unknown key; did you mean 'memory'?",
        "hosts.yaml:4: coordinator.memory: '8G' is not a size",
        "hosts.yaml:8: workers[0].addresses[1]: '10.0.0.2:99999' has no port between 1 and 65535",
        "hosts.yaml:9: workers[1].addresses[0]: mini.local:7077 is already workers[0].addresses[0]",
        "hosts.yaml:9: workers[1].name: 'mini' is already the name of workers[0]",
        "hosts.yaml:10: workers[2].addresses: should be a list",
        "hosts.yaml:10: workers[2].colour: unknown key; known here: name, addresses, memory",
        "hosts.yaml:10: workers[2].name: 'Stu dio' is not a name",
        "hosts.yaml:11: workers[3]: should hold `key: value` lines",
        "hosts.yaml:14: timeouts.connect: appears twice (first in line 13)",
        "hosts.yaml:15: timeouts.hello: has no value",
        "hosts.yaml:16: timeouts.readmit_max: 500 ms is shorter than readmit",
        "hosts.yaml:17: tls: should hold",
    ]
    for start in starts:
        assert any(row.startswith(start) for row in rows), (start, rows)
    assert len(rows) == 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: x\nworkers: [{name: a, addresses: []}]", "workers[0].addresses: has 0 items; there may be at least 1"),
        (
            "model: x\nworkers: [{name: a, addresses: [a,b,c,d,e,f,g,h,i]}]",
            "addresses: has 9 items; there may be at most 8",
        ),
        (
            "model: x\nworkers: [{name: coordinator, addresses: [a]}]",
            "'coordinator' is already the name of the coordinator",
        ),
        (
            "model: x\ncoordinator: {name: a}\nworkers: [{name: a, addresses: [b]}]",
            "already the name of the coordinator",
        ),
        ("model: x\ntimeouts: {execute: 250}", "timeouts.execute: '250' is not a time: it has no unit"),
        ("model: x\ntimeouts: {execute: 11m}", "timeouts.execute: 11 min is out of bounds. Use 1 ms to 10 min"),
        ("model: x\ntimeouts: {execute: 0s}", "timeouts.execute: '0s' is no time at all"),
        ("model: x\ncoordinator: {memory: 0}", "coordinator.memory: '0' is not a size"),
        ("model: x\ncoordinator: {memory: [8GiB]}", "coordinator.memory: ['8GiB'] is not a size"),
        ("model: x\ncoordinator: {listen: [a]}", "coordinator.listen: is not an address"),
        ("model: [x]", "model: is not a path"),
        ("model: ''", "model: is not a path"),
        ("model:", "model: has no value"),
        ("model: ~nobody-here/x", "model: has a home folder that is not known"),
        ("<<: {model: x}", "<<: unknown key"),
        ("", "is empty"),
        ("- a", "is not a list of `key: value` lines"),
        ("just text", "is not a list of `key: value` lines"),
    ],
)
def test_one_problem_is_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in "\n".join(_problems(tmp_path, text))


def test_the_number_of_workers_is_bounded(tmp_path: Path) -> None:
    def rows(count: int) -> str:
        return "model: x\nworkers:\n" + "".join(f"- {{name: w{i}, addresses: [h{i}]}}\n" for i in range(count))

    assert len(load_hosts(_write(tmp_path, rows(64))).workers) == 64
    assert "workers: has 65 items; there may be at most 64" in _problems(tmp_path, rows(65))[0]


def test_many_problems_are_cut(tmp_path: Path) -> None:
    rows = _problems(tmp_path, "model: x\n" + "".join(f"k{i}: 1\n" for i in range(500)))
    assert rows[0].endswith("has 500 problems:")
    assert rows[-1] == "and 450 more."


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hosts\.yaml does not exist\. Create one, see .* README") as caught:
        load_hosts(tmp_path / "hosts.yaml")
    assert caught.value.exit_status == 2


def test_values_are_frozen_and_clash_free_without_a_file_too() -> None:
    mini = {"name": "mini", "addresses": ["a"]}
    config = HostsConfig.model_validate({"model": "/m", "workers": [mini]})
    with pytest.raises(ValidationError, match="frozen"):
        config.model = Path("/other")  # type: ignore[misc]
    with pytest.raises(ValidationError, match="already the name"):
        HostsConfig.model_validate({"model": "/m", "workers": [mini, mini]})
    assert HostsConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("short", 0o600, "16 to 512 characters"),
        ("k" * 513, 0o600, "16 to 512 characters"),
        ("\n" + "k" * 32, 0o600, "16 to 512 characters"),
        ("secret key with spaces", 0o600, "spaces"),
        ("schlüsselschlüssel", 0o600, "outside ASCII"),
        ("k" * 32, 0o640, "chmod 600"),
        ("k" * 32, 0o604, "chmod 600"),
    ],
)
def test_a_key_that_is_not_one_is_refused_and_not_shown(tmp_path: Path, content: str, mode: int, message: str) -> None:
    _key(tmp_path, content, mode)
    (row,) = _problems(tmp_path, "model: x\ncoordinator: {api_key_file: key}")
    assert row.startswith("hosts.yaml:2: coordinator.api_key_file: ")
    assert message in row
    assert not content.strip() or content.strip() not in row


def test_a_key_is_the_first_line(tmp_path: Path) -> None:
    assert read_api_key(_key(tmp_path, "0123456789abcdef\r\nsecond line\n")) == "0123456789abcdef"
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="openssl rand -hex 32"):
            read_api_key(absent)


_KEYS = ["model", "coordinator", "workers", "name", "addresses", "memory", "listen", "api_key_file", "tls", "timeouts"]
_SCALARS = st.one_of(
    st.none(), st.text(max_size=12), st.sampled_from(["8GiB", "2s", "mini", "a:1", "/tmp", "~x/y", "0"])
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text(max_size=5)), inner, max_size=5),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(text=st.one_of(st.text(max_size=300), _TREES.map(repr)))
def test_any_file_is_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-hosts.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_hosts(path)
    except ConfigError as error:
        assert str(error)  # noqa: PT017  (either outcome is fine, another exception is not)


@settings(deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-hosts.yaml"
    path.write_bytes(raw)
    try:
        load_hosts(path)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
