"""Run: `.venv/bin/pytest tests/common/security/test_authority.py`."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from titan.common.errors import (
    CertificateExpired,
    CertificateInvalid,
    CertificateMissing,
    ConfigError,
    KeyExists,
    SecurityError,
)
from titan.common.security import Role, load_credentials, parse_identity
from titan.common.security import files as secret_files
from titan.common.security.authority import init_authority, issue, load_authority, sign
from titan.common.security.files import NewFile, locked_folder, write_together

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_is_a_small_ca_and_loads_again(tmp_path: Path) -> None:
    made = init_authority(tmp_path / "certs", now=NOW)
    loaded = load_authority(tmp_path / "certs", now=NOW)
    assert loaded.cluster == made.cluster
    assert len(made.cluster) == 32
    constraints = made.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    assert isinstance(made.key.curve, ec.SECP256R1)
    assert made.certificate.not_valid_after_utc == NOW + timedelta(days=3650)
    assert _mode(tmp_path / "certs") == 0o700
    assert init_authority(tmp_path / "other").cluster != made.cluster


@pytest.mark.parametrize(
    ("role", "uses"),
    [
        (Role.WORKER, {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        (Role.COORDINATOR, {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        (Role.OPERATOR, {ExtendedKeyUsageOID.CLIENT_AUTH}),
    ],
)
def test_a_certificate_says_who_where_and_what_for(
    tmp_path: Path, role: Role, uses: set[x509.ObjectIdentifier]
) -> None:
    authority = init_authority(tmp_path, now=NOW)
    hosts = ["Mini.local.", "10.0.0.2", "fe80::1%en0", "10.0.0.2"]
    issued = issue(authority, "mini", role=role, hosts=hosts, days=10, now=NOW)
    certificate = x509.load_pem_x509_certificate(issued.cert_path.read_bytes())
    identity = parse_identity(certificate)
    assert identity == issued.identity
    assert (identity.name, identity.role, identity.cluster) == ("mini", role, authority.cluster)
    assert identity.hosts == ("mini.local", "10.0.0.2", "fe80::1")
    assert identity.not_before == NOW - timedelta(minutes=5)
    assert identity.not_after == NOW + timedelta(days=10)
    assert set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == uses
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        f"titan://cluster/{authority.cluster}/{role}/mini"
    ]
    assert f"mini.{role}.titan.internal" in names.get_values_for_type(x509.DNSName)


def test_openssl_accepts_the_chain_by_its_strict_rules(tmp_path: Path) -> None:
    issued = issue(init_authority(tmp_path), "mini", role=Role.WORKER, hosts=["mini.local"])
    for purpose in ("sslserver", "sslclient"):
        verify = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(tmp_path / "ca.pem")]
        subprocess.run([*verify, str(issued.cert_path)], check=True, timeout=20, capture_output=True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_one_loopback_host_stands_for_all(tmp_path: Path, host: str) -> None:
    issued = issue(init_authority(tmp_path), "mini", role=Role.WORKER, hosts=[host])
    assert {"localhost", "127.0.0.1", "::1"} == set(issued.identity.hosts)


def test_loopback_is_not_there_unless_asked_for(tmp_path: Path) -> None:
    issued = issue(init_authority(tmp_path), "mini", role=Role.WORKER, hosts=["10.0.0.2"])
    assert issued.identity.hosts == ("10.0.0.2",)


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    authority = init_authority(tmp_path, now=NOW)
    late = NOW + timedelta(days=3600)
    issued = issue(authority, "mini", role=Role.WORKER, hosts=["a"], days=825, now=late)
    assert issued.identity.not_after == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("name", ["", "ca", "Mini", "a b", "-a", "a-", "a" * 64, "../x", "a/b", "a.b", "ä", "a\n"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    authority = init_authority(tmp_path / "certs")
    with pytest.raises(ConfigError, match="name"):
        issue(authority, name, role=Role.WORKER, hosts=["a"])
    assert sorted(p.name for p in (tmp_path / "certs").iterdir()) == ["ca.key", "ca.pem"]


@pytest.mark.parametrize(
    "host", ["", "a b", "a:7077", "*.local", "300.1.1.1", "0.0.0.0", "a" * 300, "a\0b", "http://a"]
)
def test_a_host_that_cannot_be_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError):
        issue(init_authority(tmp_path), "mini", role=Role.WORKER, hosts=[host])


def test_a_worker_needs_a_host_and_days_have_bounds(tmp_path: Path) -> None:
    authority = init_authority(tmp_path)
    with pytest.raises(ConfigError, match="--host"):
        issue(authority, "mini", role=Role.WORKER)
    for days in (0, -1, 10_000_000_000):
        with pytest.raises(ConfigError, match="days"):
            issue(authority, "mini", role=Role.WORKER, hosts=["a"], days=days)
    with pytest.raises(ConfigError, match="too many"):
        issue(authority, "mini", role=Role.WORKER, hosts=[f"h{i}" for i in range(65)])


def test_keys_are_private_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    real_open = os.open

    def spy(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if ".key" in str(path):
            modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    old = os.umask(0)
    try:
        monkeypatch.setattr(secret_files.os, "open", spy)
        issue(init_authority(tmp_path), "mini", role=Role.WORKER, hosts=["a"])
    finally:
        os.umask(old)
    assert modes == [0o600, 0o600]
    assert {p.name: _mode(p) for p in tmp_path.iterdir() if p.is_file()} == {
        "ca.key": 0o600,
        "ca.pem": 0o644,
        "mini.key": 0o600,
        "mini.pem": 0o644,
    }


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    authority = init_authority(tmp_path)
    issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(KeyExists, match=r"mini\.key"):
        issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    with pytest.raises(KeyExists, match=r"ca\.key"):
        init_authority(tmp_path)
    (tmp_path / "mini.key").unlink()  # a certificate alone is protected too
    with pytest.raises(KeyExists, match=r"mini\.pem"):
        issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    (tmp_path / "lost.key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyExists, match=r"lost\.key"):
        issue(authority, "lost", role=Role.WORKER, hosts=["a"])
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "mini.key")


def test_force_replaces_key_and_certificate_together(tmp_path: Path) -> None:
    authority = init_authority(tmp_path)
    first = issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    key = first.key_path.read_bytes()
    second = issue(authority, "mini", role=Role.WORKER, hosts=["b"], force=True)
    assert second.key_path.read_bytes() != key
    assert load_credentials(tmp_path / "ca.pem", second.cert_path, second.key_path).identity.hosts == ("b",)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ca.key", "ca.pem", "issued", "mini.key", "mini.pem"]


@pytest.mark.parametrize("failing_call", range(1, 5))
def test_a_failure_at_any_rename_leaves_the_old_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Calls 1 and 2 are the renames of key and certificate; the later ones belong to the repair and are let through."""
    authority = init_authority(tmp_path)
    issued = issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    calls = 0
    real_replace, real_fsync = os.replace, os.fsync

    def replace(source: Path, target: Path) -> None:
        nonlocal calls
        calls += target.parent == tmp_path  # not the copy that the authority keeps
        if calls == failing_call:
            raise OSError(28, "No space left on device", str(target))
        real_replace(source, target)

    def fsync(fd: int) -> None:
        if failing_call == 3 and stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(5, "Input/output error")
        if failing_call == 4:
            raise OSError(28, "No space left on device")
        real_fsync(fd)

    monkeypatch.setattr(secret_files.os, "replace", replace if failing_call < 3 else real_replace)
    monkeypatch.setattr(secret_files.os, "fsync", fsync)
    with pytest.raises(SecurityError, match="nothing was changed"):
        issue(authority, "mini", role=Role.WORKER, hosts=["b"], force=True)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert load_credentials(tmp_path / "ca.pem", issued.cert_path, issued.key_path).identity.hosts == ("a",)


def test_a_failed_first_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()  # a folder where the second file should go
    with pytest.raises(SecurityError, match="nothing was changed"):
        write_together([NewFile(tmp_path / "a", b"1", 0o600), NewFile(tmp_path / "b", b"2", 0o600)])
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_two_commands_do_not_write_at_once(tmp_path: Path) -> None:
    authority = init_authority(tmp_path)
    with locked_folder(tmp_path), pytest.raises(SecurityError, match="another command"):
        issue(authority, "mini", role=Role.WORKER, hosts=["a"])
    outcomes: list[object] = []

    def race() -> None:
        try:
            outcomes.append(issue(authority, "mini", role=Role.WORKER, hosts=["a"]))
        except SecurityError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(not isinstance(outcome, SecurityError) for outcome in outcomes) == 1
    load_credentials(tmp_path / "ca.pem", tmp_path / "mini.pem", tmp_path / "mini.key")


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SecurityError, match="file"):
        init_authority(tmp_path / "file")
    with pytest.raises(SecurityError, match="file"):
        init_authority(tmp_path / "file" / "certs")


def test_an_authority_that_cannot_sign_says_why(tmp_path: Path) -> None:
    with pytest.raises(CertificateMissing, match="titan certs init"):
        load_authority(tmp_path)
    init_authority(tmp_path / "a", now=NOW)
    with pytest.raises(CertificateExpired, match="2036"):
        load_authority(tmp_path / "a", now=NOW + timedelta(days=3651))
    (tmp_path / "a" / "ca.key").chmod(0o640)
    with pytest.raises(CertificateInvalid, match="chmod 600"):
        load_authority(tmp_path / "a", now=NOW)
    (tmp_path / "a" / "ca.key").chmod(0o600)
    init_authority(tmp_path / "b", now=NOW)
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(CertificateInvalid, match="not the key"):
        load_authority(tmp_path / "a", now=NOW)
    (tmp_path / "a" / "ca.key").write_text("nonsense")
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        load_authority(tmp_path / "a", now=NOW)
    member = issue(load_authority(tmp_path / "b", now=NOW), "mini", role=Role.WORKER, hosts=["a"], now=NOW)
    (tmp_path / "b" / "ca.pem").write_bytes(member.cert_path.read_bytes())
    with pytest.raises(CertificateInvalid, match="not the authority"):
        load_authority(tmp_path / "b", now=NOW)


def test_a_key_that_stays_at_home_can_be_signed(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = sign(init_authority(tmp_path), key.public_key(), "mini", role=Role.WORKER, hosts=["a"])
    assert certificate.public_key() == key.public_key()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["ca.key", "ca.pem"]
