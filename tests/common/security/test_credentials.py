"""Run: `.venv/bin/pytest tests/common/security/test_credentials.py`."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import PEM_cert_to_DER_cert

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from fixtures.certificates import Cluster, make_cluster
from hypothesis import given
from hypothesis import strategies as st

from titan.common.errors import (
    CertificateExpired,
    CertificateInvalid,
    CertificateMissing,
    RoleRefused,
    SecurityError,
)
from titan.common.security import (
    Credentials,
    Role,
    host_matches,
    load_credentials,
    load_credentials_dir,
    parse_identity,
    require_role,
)
from titan.common.security.authority import Authority, issue


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "certs")


def _load(credentials: Credentials, **changes: Path) -> Credentials:
    paths = {"ca": credentials.ca_path, "cert": credentials.cert_path, "key": credentials.key_path} | changes
    return load_credentials(paths["ca"], paths["cert"], paths["key"])


def test_good_credentials_load_and_hide_their_key(cluster: Cluster) -> None:
    mini = cluster.member("mini", hosts=["mini.local", "10.0.0.2"])
    assert mini.identity.name == "mini"
    assert mini.identity.role is Role.WORKER
    assert "PRIVATE" not in repr(mini)
    assert str(mini.identity) == "worker mini"


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_a_missing_file_names_the_command(cluster: Cluster, tmp_path: Path, missing: str) -> None:
    mini = cluster.member("mini")
    absent = tmp_path / "gone" / "mini.pem"
    with pytest.raises(CertificateMissing, match=r"gone/mini\.pem does not exist.*titan certs (init|issue mini)"):
        _load(mini, **{missing: absent})


def test_an_expired_certificate_is_refused_with_date_and_command(cluster: Cluster) -> None:
    made = datetime.now(UTC) - timedelta(days=40)
    mini = cluster.member("mini", hosts=["mini.local"], days=30, now=made)
    command = "`titan certs issue mini --role worker --host mini.local --force`"
    with pytest.raises(CertificateExpired, match=rf"expired on {mini.identity.not_after:%Y-%m-%d}.*{command}"):
        _load(mini)


def test_an_expired_authority_is_refused(cluster: Cluster) -> None:
    mini = cluster.member("mini")
    with pytest.raises(CertificateExpired, match="authority"):
        load_credentials(mini.ca_path, mini.cert_path, mini.key_path, now=datetime.now(UTC) + timedelta(days=4000))


def test_a_certificate_from_the_future_blames_the_clock(cluster: Cluster) -> None:
    mini = cluster.member("mini", now=datetime.now(UTC) + timedelta(minutes=4))
    _load(mini)  # clocks may differ by five minutes
    mini = cluster.member("mini", now=datetime.now(UTC) + timedelta(days=1))
    with pytest.raises(CertificateInvalid, match="clock"):
        _load(mini)


def test_another_clusters_authority_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    mini = cluster.member("mini")
    other = make_cluster(tmp_path / "other")
    with pytest.raises(CertificateInvalid, match="not issued by the authority"):
        _load(mini, ca=other.folder / "ca.pem")


def test_two_authorities_in_one_file_serve_a_change_of_authority(cluster: Cluster, tmp_path: Path) -> None:
    mini, other = cluster.member("mini"), make_cluster(tmp_path / "other")
    both = tmp_path / "both.pem"
    both.write_bytes((other.folder / "ca.pem").read_bytes() + (cluster.folder / "ca.pem").read_bytes())
    assert _load(mini, ca=both).identity == mini.identity


def test_a_member_cannot_issue(cluster: Cluster) -> None:
    """A certificate that another member signed must not pass, though its chain of signatures is whole."""
    mini = cluster.member("mini")
    key = load_pem_private_key(mini.key_pem, None)
    rogue = Authority(
        cluster.folder,
        cluster.authority.cluster,
        x509.load_pem_x509_certificate(mini.cert_pem),
        key,  # type: ignore[arg-type]
    )
    forged = issue(rogue, "coordinator", role=Role.COORDINATOR)
    with pytest.raises(CertificateInvalid, match="not issued by"):
        load_credentials(mini.ca_path, forged.cert_path, forged.key_path)
    with pytest.raises(CertificateInvalid, match="not an authority"):
        load_credentials(mini.cert_path, forged.cert_path, forged.key_path)


def test_a_key_of_another_certificate_is_refused(cluster: Cluster) -> None:
    mini, studio = cluster.member("mini"), cluster.member("studio")
    with pytest.raises(CertificateInvalid, match="not the key of"):
        _load(mini, key=studio.key_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610])
def test_an_open_key_is_refused_with_the_mend(cluster: Cluster, mode: int) -> None:
    mini = cluster.member("mini")
    mini.key_path.chmod(mode)
    with pytest.raises(CertificateInvalid, match=r"chmod 600 .*mini\.key"):
        _load(mini)


def test_odd_files_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    mini = cluster.member("mini")
    big, pipe, text = tmp_path / "big", tmp_path / "pipe", tmp_path / "text"
    big.write_bytes(b"x" * 300_000)
    os.mkfifo(pipe)
    text.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    for odd in (big, pipe, text, tmp_path):
        odd.chmod(0o700 if odd.is_dir() else 0o600)
        for which in ("ca", "cert", "key"):
            with pytest.raises(CertificateInvalid, match=odd.name):
                _load(mini, **{which: odd})
    with pytest.raises(CertificateInvalid, match="member of a Titan cluster"):
        _load(mini, cert=mini.ca_path)


def test_a_folder_gives_the_one_certificate_of_a_role(cluster: Cluster, tmp_path: Path) -> None:
    coordinator = cluster.member("coordinator", Role.COORDINATOR)
    with pytest.raises(CertificateMissing, match="titan certs issue NAME --role worker"):
        load_credentials_dir(cluster.folder, role=Role.WORKER)
    mini = cluster.member("mini")
    (cluster.folder / "broken.pem").write_text("x")
    (cluster.folder / "broken.key").write_text("x")
    assert load_credentials_dir(cluster.folder, role=Role.COORDINATOR) == coordinator
    assert load_credentials_dir(cluster.folder, role=Role.WORKER) == mini
    studio = cluster.member("studio")
    with pytest.raises(CertificateInvalid, match=r"mini, studio.*--name"):
        load_credentials_dir(cluster.folder, role=Role.WORKER)
    assert load_credentials_dir(cluster.folder, role=Role.WORKER, name="studio") == studio
    with pytest.raises(RoleRefused):
        load_credentials_dir(cluster.folder, role=Role.WORKER, name="coordinator")
    with pytest.raises(CertificateMissing):
        load_credentials_dir(tmp_path / "absent", role=Role.WORKER)


def test_a_role_is_required(cluster: Cluster) -> None:
    identity = cluster.member("mini").identity
    require_role(identity, Role.WORKER)
    require_role(identity, Role.OPERATOR, Role.WORKER)
    with pytest.raises(RoleRefused, match=r"mini.*role worker.*needs operator or coordinator"):
        require_role(identity, Role.OPERATOR, Role.COORDINATOR)


def test_hosts_match_as_names_and_addresses(cluster: Cluster) -> None:
    identity = cluster.member("mini", hosts=["mini.local", "10.0.0.2", "fe80::1"]).identity
    for host in ("mini.local", "MINI.local.", "10.0.0.2", "fe80::1", "fe80:0::1%en0"):
        assert host_matches(identity, host), host
    for host in ("local", "x.mini.local", "10.0.0.3", "fe80::2", "localhost", "", "*", "mini.worker.titan.internal"):
        assert not host_matches(identity, host), host


def test_der_and_pem_say_the_same(cluster: Cluster) -> None:
    mini = cluster.member("mini")
    assert (
        parse_identity(PEM_cert_to_DER_cert(mini.cert_pem.decode())) == parse_identity(mini.cert_pem) == mini.identity
    )


@given(st.binary(max_size=200))
def test_bytes_are_no_identity(raw: bytes) -> None:
    for data in (raw, b"-----BEGIN CERTIFICATE-----\n" + raw + b"\n-----END CERTIFICATE-----\n"):
        with pytest.raises(CertificateInvalid):
            parse_identity(data)


def test_a_damaged_certificate_is_refused_or_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = make_cluster(tmp_path_factory.mktemp("damage") / "certs")
    der = PEM_cert_to_DER_cert(cluster.member("mini").cert_pem.decode())
    for index in range(len(der)):
        damaged = bytearray(der)
        damaged[index] ^= 0x21
        try:
            parse_identity(bytes(damaged))
        except SecurityError as error:
            assert "certificate" in str(error)  # noqa: PT017  (either outcome is fine, another exception is not)
    with pytest.raises(CertificateInvalid, match="too large"):
        parse_identity(b"x" * 70_000)
