"""Who is who in a cluster: the authority, identities in certificates, TLS settings."""

from __future__ import annotations

from titan.common.security.credentials import Credentials, load_credentials, load_credentials_dir
from titan.common.security.identity import (
    Identity,
    Role,
    host_matches,
    parse_identity,
    require_role,
)
from titan.common.security.tls import (
    channel_options,
    client_ssl_context,
    explain_tls_failure,
    grpc_channel_credentials,
    grpc_server_credentials,
    peer_identity,
    prepare_grpc,
    server_ssl_context,
)

__all__ = [
    "Credentials",
    "Identity",
    "Role",
    "channel_options",
    "client_ssl_context",
    "explain_tls_failure",
    "grpc_channel_credentials",
    "grpc_server_credentials",
    "host_matches",
    "load_credentials",
    "load_credentials_dir",
    "parse_identity",
    "peer_identity",
    "prepare_grpc",
    "require_role",
    "server_ssl_context",
]
