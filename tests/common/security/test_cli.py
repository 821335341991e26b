"""`titan certs`. Run: `.venv/bin/pytest tests/common/security/test_cli.py`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from fixtures.certificates import make_cluster
from typer.testing import CliRunner, Result

from titan.common.errors import CertificateInvalid, CertificateMissing, ConfigError, KeyExists
from titan.common.security import Role, load_credentials
from titan.common.security.cli import list_certificates, register


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["certs", *arguments], env={"COLUMNS": "200"})


def test_from_nothing_to_credentials_of_both_sides() -> None:
    for command in (
        ["init"],
        ["issue", "coordinator"],
        ["issue", "mini", "--host", "mini.local", "--host", "10.0.0.2", "--days", "90"],
        ["issue", "me", "--role", "operator"],
    ):
        result = _run(*command)
        assert result.exit_code == 0, result.output
    roles = {
        name: load_credentials("certs/ca.pem", f"certs/{name}.pem", f"certs/{name}.key").identity.role
        for name in ("coordinator", "mini", "me")
    }
    assert roles == {"coordinator": Role.COORDINATOR, "mini": Role.WORKER, "me": Role.OPERATOR}
    shown = _run("show")
    assert shown.exit_code == 0
    for text in ("ca.pem", "authority", "titan cluster ", "mini.local", "10.0.0.2", "operator"):
        assert text in shown.output


def test_another_folder_and_force() -> None:
    assert _run("init", "--dir", "elsewhere").exit_code == 0
    issue = ["issue", "mini", "--host", "a", "--dir", "elsewhere"]
    assert _run(*issue).exit_code == 0
    assert isinstance(_run(*issue).exception, KeyExists)
    assert _run(*issue, "--force").exit_code == 0
    assert isinstance(_run("init", "--dir", "elsewhere").exception, KeyExists)
    assert _run("init", "--dir", "elsewhere", "--force").exit_code == 0
    with pytest.raises(CertificateInvalid, match="not issued by"):  # of the cluster that was
        load_credentials("elsewhere/ca.pem", "elsewhere/mini.pem", "elsewhere/mini.key")


def test_mistakes_are_named() -> None:
    missing = _run("issue", "mini", "--host", "a").exception
    assert isinstance(missing, CertificateMissing)
    assert "titan certs init" in str(missing)
    assert _run("init").exit_code == 0
    assert isinstance(_run("issue", "mini").exception, ConfigError)
    assert isinstance(_run("issue", "../mini", "--host", "a").exception, ConfigError)
    assert _run("issue", "mini", "--host", "a", "--role", "king").exit_code == 2
    assert isinstance(_run("show", "nowhere").exception, CertificateMissing)
    Path("empty").mkdir()
    assert isinstance(_run("show", "empty").exception, CertificateMissing)
    assert isinstance(_run("show", "certs/ca.key").exception, CertificateInvalid)


def test_expiry_is_shown_before_and_after() -> None:
    cluster = make_cluster(Path("certs"))
    now = datetime.now(UTC)
    cluster.member("fine", days=40)
    cluster.member("soon", days=10)
    cluster.member("gone", days=1, now=now - timedelta(days=5))
    cluster.member("early", now=now + timedelta(days=1))
    Path("certs/noise.pem").write_text("noise")
    states = {row.path.stem: row.state for row in list_certificates(Path("certs"))}
    assert states == {
        "ca": "ok",
        "fine": "ok",
        "soon": "soon",
        "gone": "expired",
        "early": "early",
        "noise": "unreadable",
    }
    output = _run("show").output
    assert "EXPIRED" in output
    assert "soon expires soon: renew it with `titan certs issue soon --role worker" in output
    assert "gone has expired" in output


def test_json_lists_everything() -> None:
    cluster = make_cluster(Path("certs"))
    mini = cluster.member("mini", hosts=["10.0.0.2"], days=60)
    (entry,) = json.loads(_run("show", "certs/mini.pem", "--json").stdout)
    assert entry == {
        "path": "certs/mini.pem",
        "subject": "mini",
        "role": "worker",
        "hosts": ["10.0.0.2"],
        "expires": mini.identity.not_after.isoformat(),
        "state": "ok",
        "key": True,
    }
    assert len(json.loads(_run("show", "--json").stdout)) == 2
