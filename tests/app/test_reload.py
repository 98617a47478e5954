"""What a SIGHUP reads again, and what it leaves as it is."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from lucevisor.app.run import Overrides, apply_live_keys, read_server_keys, tls_context
from lucevisor.config import Config, load
from lucevisor.errors import ConfigError
from tests.api.scripted_model import Rig
from tests.certificates import make_certificate
from tests.config.boxes import SMALLEST


class Box:
    """A configuration file, its files of keys and TLS, and the ports they apply to."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.file = directory, directory / "box.toml"
        self.certs = {name: make_certificate(directory, name)[0] for name in ("old", "new")}
        (directory / "keys").write_text("first ann\n")
        self.write()
        self.config = load(self.file)
        self.server = Rig().context.server
        self.server.keys.replace(read_server_keys(self.config.server)[0])
        self.tls = tls_context(self.config.server)

    def write(self, name: str = "old", server: str = "", more: str = "") -> None:
        self.file.write_text(
            f'{SMALLEST}\n[server]\napi_keys_file = "keys"\n{server}\n'
            f'tls_cert_file = "{name}.crt"\ntls_key_file = "{name}.key"\n{more}'
        )

    def reload(self, *overrides: str) -> tuple[list[str], list[str]]:
        found = Overrides(self.file, overrides).load()
        self.config, changed, waiting = apply_live_keys(self.config, found, self.server, self.tls)
        return changed, waiting

    def accepts(self, key: str) -> bool:
        return self.server.keys.caller(key) is not None

    def shows(self) -> str:
        """Which certificate a new connection would be shown."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        plain = ssl.create_default_context()
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        client = plain.wrap_bio(incoming, outgoing)
        server = self.tls.wrap_bio(outgoing, incoming, server_side=True)
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        shown = client.getpeercert(True)
        return next(n for n, c in self.certs.items() if ssl.PEM_cert_to_DER_cert(c.read_text()) == shown)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    yield Box(tmp_path)
    structlog.reset_defaults()


def test_nothing_changes_without_a_change(box: Box) -> None:
    before = box.config
    assert box.reload() == ([], [])
    assert box.config == before
    assert box.accepts("first")


def test_keys_certificate_level_and_origins_are_applied_at_once(box: Box) -> None:
    (box.directory / "keys").write_text("second bob\n")
    box.write("new", 'cors_origins = ["https://a.example"]', '[log]\nlevel = "error"\n')
    assert box.shows() == "old"
    changed, waiting = box.reload()
    assert set(changed) == {"server.tls_cert_file", "server.tls_key_file", "server.cors_origins", "log.level"}
    assert waiting == []
    assert (box.accepts("first"), box.accepts("second")) == (False, True)
    assert box.shows() == "new"
    assert box.server.settings.cors_origins == ("https://a.example",)
    assert structlog.get_logger("lucevisor").bind().is_enabled_for(30) is False


def test_a_renewed_certificate_in_the_same_file(box: Box) -> None:
    for suffix in ("crt", "key"):
        (box.directory / f"new.{suffix}").rename(box.directory / f"old.{suffix}")
    box.certs = {"renewed": box.certs["old"]}
    assert box.reload() == ([], [])
    assert box.shows() == "renewed"


def test_other_keys_wait_for_a_start_and_are_named_every_time(box: Box) -> None:
    box.write(more="[engine]\nmax_sequences = 3\n")
    for _ in range(2):
        assert box.reload("server.port=1") == ([], ["engine.max_sequences", "server.port"])
    assert box.config.engine.max_sequences == "auto"


def test_https_cannot_be_switched_off_while_it_listens(box: Box) -> None:
    changed, waiting = box.reload("server.tls_cert_file=", "server.tls_key_file=")
    assert (changed, set(waiting)) == ([], {"server.tls_cert_file", "server.tls_key_file"})
    assert box.config.server.tls_cert_file.endswith("old.crt")
    assert box.shows() == "old"


@pytest.mark.parametrize("fault", ["toml", "keys", "pair"])
def test_a_fault_changes_nothing(box: Box, fault: str) -> None:
    before: Config = box.config
    box.write("new", more='[log]\nlevel = "error"\n')
    if fault == "toml":
        box.file.write_text(box.file.read_text() + "colour = 1\n")
    elif fault == "keys":
        (box.directory / "keys").unlink()
    else:
        (box.directory / "old.key").rename(box.directory / "new.key")
    with pytest.raises(ConfigError):
        box.reload()
    assert box.config == before
    assert box.accepts("first")
    assert box.shows() == "old"


def test_overrides_of_a_reload_replace_those_of_the_same_key_until_the_next_one(box: Box) -> None:
    box.write(more='[log]\nlevel = "debug"\n')
    started = Overrides(box.file, ("engine.max_sequences=3", "log.level=error", "groups.left.env.KEY=secret"))
    later = replace(started, from_reload=("engine.max_sequences=5", "server.max_queue=7"))
    assert later.as_json_rows() == [
        {"key": "log.level", "value": "error", "source": "start", "hides": "debug"},
        {"key": "groups.left.env.KEY", "value": None, "source": "start", "hides": None},
        {"key": "engine.max_sequences", "value": "5", "source": "reload", "hides": None},
        {"key": "server.max_queue", "value": "7", "source": "reload", "hides": None},
    ]
    again = replace(later, from_reload=()).load()
    assert (again.engine.max_sequences, again.log.level, again.server.max_queue) == (3, "error", 256)
    found = later.load()
    assert (found.engine.max_sequences, found.log.level, found.server.max_queue) == (5, "error", 7)
