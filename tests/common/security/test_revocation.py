"""Revocation lists: made, read, refused, and what TLS makes of them.

Run: `.venv/bin/pytest tests/common/security/test_revocation.py`.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fixtures.certificates import DEADLINE_S, Cluster, make_cluster, serve, tls_echo

from titan.common.errors import CertificateInvalid, CertificateMissing, CertificateRevoked, SecurityError
from titan.common.security import Role, client_ssl_context, load_credentials, server_ssl_context
from titan.common.security import files as secret_files
from titan.common.security import revoke as revoke_module
from titan.common.security.authority import init_authority, issue
from titan.common.security.ledger import issued
from titan.common.security.revocation import (
    LIST_FILE,
    NOTHING_REVOKED,
    Revocations,
    load_revocations,
    parse_revocations,
)
from titan.common.security.revoke import revoke
from titan.common.security.tls import explain_tls_failure, renew_context


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "certs")


def _revocations(cluster: Cluster) -> Revocations:
    return Revocations(cluster.folder / "ca.pem", cluster.authority_pem)


def test_every_certificate_of_a_name_is_revoked_and_the_next_is_good(cluster: Cluster) -> None:
    first, second = cluster.member("mini"), cluster.member("mini")
    other = cluster.member("other")
    done = revoke(cluster.authority, "mini")
    assert {i.serial for i in done.identities} == {first.identity.serial, second.identity.serial}
    assert done.revocations.serials == {first.identity.serial, second.identity.serial}
    assert load_revocations(cluster.folder / "ca.pem", cluster.authority_pem) == done.revocations
    with pytest.raises(CertificateRevoked, match=r"worker mini .* was revoked"):
        load_credentials(second.ca_path, second.cert_path, second.key_path)
    load_credentials(other.ca_path, other.cert_path, other.key_path)
    third = cluster.member("mini")
    assert third.identity.serial not in done.revocations.serials
    with pytest.raises(CertificateMissing, match="'nobody'"):
        revoke(cluster.authority, "nobody")
    again = revoke(cluster.authority, "mini")
    assert again.revocations.number == done.revocations.number + 1
    assert again.revocations.serials == done.revocations.serials | {third.identity.serial}
    with pytest.raises(CertificateMissing):  # nothing is left to revoke
        revoke(cluster.authority, "mini")


def test_expired_certificates_leave_the_list(cluster: Cluster) -> None:
    now = datetime.now(UTC)
    short = cluster.member("mini", days=1)
    assert revoke(cluster.authority, "mini").revocations.serials == {short.identity.serial}
    other = cluster.member("other", days=30)
    later = revoke(cluster.authority, "other", now=now + timedelta(days=2))
    assert later.revocations.serials == {other.identity.serial}


def test_nothing_is_written_when_the_list_cannot_be(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.member("mini")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(secret_files.os, "fsync", full)
    with pytest.raises(SecurityError, match="No space left"):
        revoke(cluster.authority, "mini")
    assert not (cluster.folder / LIST_FILE).exists()
    assert not [p for p in cluster.folder.iterdir() if p.name.startswith(".")]


def test_a_list_of_another_authority_or_none_at_all_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.member("mini")
    ours = revoke(cluster.authority, "mini").revocations
    foreign = make_cluster(tmp_path / "foreign")
    der = base64.b64decode(b"".join(ours.pem.splitlines()[1:-1]))
    version_17 = base64.encodebytes(der.replace(b"\x02\x01\x01", b"\x02\x01\x11", 1))
    of_no_version = b"-----BEGIN X509 CRL-----\n" + version_17 + b"-----END X509 CRL-----\n"
    for pem in (
        b"",
        of_no_version,
        b"noise",
        ours.pem[:-40],
        cluster.authority_pem,
        b"x" * (secret_files.MAX_FILE_BYTES + 1),
    ):
        with pytest.raises(CertificateInvalid):
            parse_revocations(pem, cluster.authority_pem, "the list")
    with pytest.raises(CertificateInvalid, match="not made by this cluster's authority"):
        parse_revocations(ours.pem, foreign.authority_pem, "the list")
    # A damaged list lets nobody in: it is an error, not an empty list.
    fine = cluster.member("fine")
    (cluster.folder / LIST_FILE).write_bytes(b"noise")
    with pytest.raises(CertificateInvalid, match=r"revoked\.pem cannot be read"):
        load_credentials(fine.ca_path, fine.cert_path, fine.key_path)
    with pytest.raises(CertificateInvalid):
        revoke(cluster.authority, "fine")


def test_a_list_that_is_too_long_is_not_made(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoke_module, "MAX_REVOKED", 1)
    cluster.member("mini")
    revoke(cluster.authority, "mini")
    cluster.member("other")
    with pytest.raises(CertificateInvalid, match="more than 1 "):
        revoke(cluster.authority, "other")


def test_the_newer_list_wins_whoever_brings_it(cluster: Cluster, tmp_path: Path) -> None:
    cluster.member("mini")
    cluster.member("other")
    old = revoke(cluster.authority, "mini").revocations
    new = revoke(cluster.authority, "other").revocations
    there = tmp_path / "worker"
    there.mkdir()
    (there / "ca.pem").write_bytes(cluster.authority_pem)
    known = Revocations(there / "ca.pem", cluster.authority_pem)
    assert known.current == NOTHING_REVOKED
    assert known.offer(new.pem, "desk")
    assert not known.offer(new.pem, "desk")
    assert not known.offer(old.pem, "desk")  # an old list cannot bring anybody back
    assert known.current == new
    assert Revocations(there / "ca.pem", cluster.authority_pem).current == new  # after a restart too
    foreign = make_cluster(tmp_path / "foreign")
    foreign.member("x")
    with pytest.raises(CertificateInvalid, match="from mallory"):
        known.offer(revoke(foreign.authority, "x").revocations.pem, "mallory")
    assert known.current == new


def test_a_list_counts_even_where_it_cannot_be_kept(cluster: Cluster, tmp_path: Path) -> None:
    member = cluster.member("mini")
    there = tmp_path / "there"
    there.mkdir()
    revocations = Revocations(there / "ca.pem", cluster.authority_pem)
    there.rmdir()  # as with a full or a lost disk: nothing can be written
    done = revoke(cluster.authority, "mini")
    assert revocations.offer(done.revocations.pem, "somebody")
    assert member.identity.serial in revocations.current.serials
    assert "until this process ends" in revocations.problem
    assert not revocations.refresh()
    assert "until this process ends" in revocations.problem
    there.mkdir()
    (there / LIST_FILE).write_bytes(done.revocations.pem)
    assert not revocations.refresh()  # nothing new
    assert revocations.problem == ""


def test_a_changed_file_is_noticed_and_a_damaged_one_changes_nothing(cluster: Cluster) -> None:
    known = _revocations(cluster)
    assert not known.refresh()
    cluster.member("mini")
    new = revoke(cluster.authority, "mini").revocations
    assert known.refresh()
    assert known.current == new
    assert not known.refresh()
    path = cluster.folder / LIST_FILE
    path.write_bytes(b"noise")
    os.utime(path, ns=(1, 1))
    assert not known.refresh()
    assert "revoked.pem" in known.problem
    assert known.current == new
    path.unlink()
    assert not known.refresh()
    assert known.current == new


def test_a_new_cluster_starts_without_the_old_list(cluster: Cluster) -> None:
    cluster.member("mini")
    revoke(cluster.authority, "mini")
    authority = init_authority(cluster.folder, force=True)
    assert not (cluster.folder / LIST_FILE).exists()
    assert issued(authority.folder, authority.cluster) == []
    issue(authority, "mini", role=Role.WORKER, hosts=["a"], force=True)
    assert [i.name for i in issued(authority.folder, authority.cluster)] == ["mini"]


@pytest.mark.parametrize("who", ["client", "server"])
def test_tls_refuses_a_revoked_peer_with_an_alert(cluster: Cluster, who: str) -> None:
    worker = cluster.member("mini", hosts=["localhost"])
    desk = cluster.member("desk", Role.COORDINATOR, [])
    server_context, client_context = server_ssl_context(worker), client_ssl_context(desk)
    revoked, checker = (desk, server_context) if who == "client" else (worker, client_context)

    def talk(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
            client_context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            said = secure.recv(1)
            secure.sendall(b"?")
            return said

    with serve(tls_echo(server_context), connections=3) as server:
        assert talk(server.port) == b"!"
        cluster.member("somebody")
        revoke(cluster.authority, "somebody")
        renew_context(checker, worker if who == "client" else desk)
        assert talk(server.port) == b"!"  # a list that does not name the peer lets it in
        revoke(cluster.authority, revoked.identity.name)
        renew_context(checker, worker if who == "client" else desk)  # in a context that has the older list already
        with pytest.raises(ssl.SSLError, match=r"(?i)revoked") as refused:
            talk(server.port)
        server.finish()
    words = str(explain_tls_failure(server.address, refused.value))
    assert "revoked" in words
    assert ("this machine's" in words) == (who == "client")
    if who == "client":
        assert "revoked" in str(server.outcomes[-1])
