"""Diagnosis of a head and of this machine's certificate: versions, clocks, certificates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from mlx_ring.agent.enrolment import shown_certificate
from mlx_ring.cli.doctor import Finding
from mlx_ring.core.errors import RingError
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.hello import Greeted, ask_greeting, make_hello
from mlx_ring.rpc.protos import hello_pb2
from mlx_ring.rpc.tls.certificates import carried_authority, fingerprint, needs_renewal
from mlx_ring.rpc.tls.credentials import Anchor, load_credentials

_CLOCK_WARNING_S, _CLOCK_BROKEN_S = 5.0, 1800.0
"""Limits of the clocks' difference. A new certificate is valid from one hour before its creation."""
_SET_CLOCK = (
    "Set both clocks from the network: `timedatectl set-ntp true`, or Date & Time in a Mac's settings."
)


def check_head(head: HeadAddress, folder: Path) -> list[Finding]:
    """Compare this machine with the head at an address; `folder` is this machine's `node_folder`."""
    what = f"head {head}"
    try:
        leaf = shown_certificate(head)
        authority = carried_authority(leaf)
        known = _check_cluster(what, authority, folder)
        dates = check_dates(f"certificate of {what}", x509.load_der_x509_certificate(leaf), datetime.now(UTC))
        if dates.level == "broken":
            return [
                known,
                dates,
                Finding(
                    "note", "clock", "not compared: the head's certificate is not valid", "Fix that first."
                ),
            ]
        greeted = ask_greeting(head.enrolment, Anchor(authority.public_bytes(Encoding.PEM)))
    except RingError as error:
        return [
            Finding("broken", what, str(error), "Check the address, and that `mlx-ring serve` runs there."),
            Finding("note", "clock", "not compared: the head does not report its time", "Fix that first."),
        ]
    return [known, dates, *check_versions(greeted.hello, make_hello()), check_clock(greeted)]


def _check_cluster(what: str, authority: x509.Certificate, folder: Path) -> Finding:
    """Check that the head belongs to the cluster that this machine has joined."""
    value = f"authority {fingerprint(authority).hex()[:16]}"
    try:
        kept = load_credentials(folder)
    except RingError:
        return Finding("note", what, value)
    if kept is None:
        fix = "To join it: mlx-ring join HEAD --token TOKEN, with a token from `mlx-ring token create` there."
        return Finding("note", what, f"{value}; this machine has not joined it yet", fix)
    if fingerprint(x509.load_pem_x509_certificate(kept.authority)) != fingerprint(authority):
        fix = "Check the address, or join that cluster: mlx-ring join HEAD --token TOKEN."
        return Finding("broken", what, f"{value}, but this machine belongs to another cluster", fix)
    return Finding("ok", what, value)


def check_versions(theirs: hello_pb2.Hello, ours: hello_pb2.Hello) -> list[Finding]:
    """Compare the versions that must be equal on every machine."""
    if theirs.protocol != ours.protocol:
        value = f"{theirs.protocol} on the head, {ours.protocol} here"
        return [Finding("broken", "protocol", value, "Install the same mlx-ring on both.")]
    packages = (("mlx-ring", "mlx_ring"), ("mlx", "mlx"), ("mlx-lm", "mlx_lm"))
    return [_check_version(name, getattr(theirs, field), getattr(ours, field)) for name, field in packages]


def _check_version(package: str, theirs: str, ours: str) -> Finding:
    if theirs == ours:
        return Finding("ok", package, f"{ours} on both")
    fix = f"Install {package} {theirs} here, as on the head, or another on both."
    return Finding("broken", package, f"{theirs} on the head, {ours} here", fix)


def check_clock(greeted: Greeted) -> Finding:
    """Compare both clocks, with the round trip's uncertainty subtracted."""
    apart_s = max(0.0, abs(greeted.skew_s) - greeted.uncertain_s)
    value = f"the head's is {abs(greeted.skew_s):.3f} s {'ahead' if greeted.skew_s > 0 else 'behind'}"
    if apart_s > _CLOCK_WARNING_S:
        return Finding("broken" if apart_s > _CLOCK_BROKEN_S else "warning", "clock", value, _SET_CLOCK)
    return Finding("ok", "clock", value)


def check_own_certificate(folder: Path) -> Sequence[Finding]:
    """Check this machine's certificate, if it has joined a cluster."""
    what = "certificate of this machine"
    try:
        kept = load_credentials(folder)
    except RingError as error:
        return (Finding("broken", what, str(error), f"Remove {folder} and join again with a token."),)
    if kept is None:
        return ()
    return (check_dates(what, x509.load_pem_x509_certificate(kept.certificate), datetime.now(UTC)),)


def check_dates(what: str, certificate: x509.Certificate, now: datetime) -> Finding:
    """Check that a certificate is valid now by this machine's clock."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        value = f"valid only from {begins:%Y-%m-%d %H:%M} UTC on, but this clock shows {now:%Y-%m-%d %H:%M}"
        return Finding("broken", what, value, _SET_CLOCK)
    if now > ends:
        fix = f"Join again with a token from `mlx-ring token create`, or correct this clock, which shows {now:%Y-%m-%d}."
        return Finding("broken", what, f"expired on {ends:%Y-%m-%d}", fix)
    value = f"valid until {ends:%Y-%m-%d}"
    if needs_renewal(certificate, now):
        fix = "Nothing: it is renewed automatically while the head can be reached."
        return Finding("note", what, f"{value}, to be renewed", fix)
    return Finding("ok", what, value)
