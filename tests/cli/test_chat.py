"""`lucevisor chat`: its commands, and answers from a server that a test writes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from lucevisor.cli import chat as module
from lucevisor.cli import cli
from lucevisor.cli.chat import HELP, Conversation
from tests.api.conftest import live  # noqa: F401  # a fixture
from tests.api.scripted_model import MODEL, Rig, say


@pytest.fixture(autouse=True)
def quiet():
    """The server logs in this process, whose output is the chat's."""
    with capture_logs():
        yield


def test_commands_change_what_is_sent():
    talk = Conversation(messages=[{"role": "user", "content": "Hi"}])
    assert talk.run_command("/temperature 0.25") == "temperature 0.25"
    assert talk.run_command("/think on") == "thinking is on"
    assert (talk.temperature, talk.think, len(talk.sent())) == (0.25, True, 1)
    assert talk.run_command("/system  Be brief. ") == "a new conversation with this system prompt"
    assert talk.sent() == [{"role": "system", "content": "Be brief."}]
    assert talk.run_command("/system") == "a new conversation without system prompt"
    assert talk.sent() == []
    assert talk.run_command("/help") == HELP
    assert talk.run_command("/quit") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/temperature", "/temperature takes a number from 0 to 2"),
        ("/temperature 3", "/temperature takes a number from 0 to 2"),
        ("/temperature nan", "/temperature takes a number from 0 to 2"),
        ("/think", "/think takes on or off"),
        ("/hlep", "there is no command /hlep; did you mean /help?"),
        ("/xyzzy", "there is no command /xyzzy; /help lists them"),
    ],
)
def test_a_wrong_command_changes_nothing(line, said):
    talk = Conversation()
    assert talk.run_command(line) == said
    assert talk == Conversation()


def test_a_conversation(live, monkeypatch):  # noqa: F811
    server = live(lambda: Rig())
    server.do(lambda rig: setattr(rig.stage, "script", say("**Hello** there!")))
    monkeypatch.setattr(module, "find_supervisor", lambda *_: type("Target", (), {"socket": None}))
    status = {"url": server.url, "tls_cert_file": "", "model": {"name": MODEL}, "models": []}
    monkeypatch.setattr(module.AdminClient, "call", lambda *_: status)
    typed = "/temperature 0\nHi\n\nGo \\\non\n/new\nAgain\n"
    done = CliRunner().invoke(cli, ["chat", "--system", "Be brief."], input=typed)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("**Hello** there!") == 3  # no terminal: as it came
    prompts = server.do(
        lambda rig: [rig.context.tokenizer.decode(s.prompt, skip_special=False) for s in rig.stage.opened]
    )
    assert [text.count("Be brief.") for text in prompts] == [1, 1, 1]
    assert "Hello" in prompts[1]
    assert "Go \non" in prompts[1]
    assert "Hello" not in prompts[2]


def test_what_was_not_answered_is_not_sent_again(live, monkeypatch):  # noqa: F811
    server = live(lambda: Rig())
    server.do(lambda rig: rig.lose())
    monkeypatch.setattr(module, "find_supervisor", lambda *_: type("Target", (), {"socket": None}))
    monkeypatch.setattr(
        module.AdminClient,
        "call",
        lambda *_: {"url": server.url, "tls_cert_file": "", "model": {"name": "wrong"}, "models": []},
    )
    done = CliRunner().invoke(cli, ["chat"], input="One\nTwo\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("is not served") + done.stderr.count("model") >= 2


def test_one_of_several_models_is_chosen(live, monkeypatch):  # noqa: F811
    server = live(lambda: Rig())
    monkeypatch.setattr(module, "find_supervisor", lambda *_: type("Target", (), {"socket": None}))
    models = [{"name": "first"}, {"name": MODEL}]
    status = {"url": server.url, "tls_cert_file": "", "model": models[0], "models": models}
    monkeypatch.setattr(module.AdminClient, "call", lambda *_: status)
    done = CliRunner().invoke(cli, ["chat", "--model", MODEL], input="Hi\n")
    assert done.exit_code == 0, done.output
    assert f"{MODEL} at {server.url} (--model chooses of first, {MODEL}); /help" in done.stderr
    assert server.do(lambda rig: len(rig.stage.opened)) == 1
    done = CliRunner().invoke(cli, ["chat"], input="Hi\n")
    assert 'the model "first" does not exist here' in done.stderr
