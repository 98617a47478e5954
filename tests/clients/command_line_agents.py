"""Runs the claude, codex and aider command-line agents, with their own prompts and tools, against a scripted model.

    python -m tests.clients.command_line_agents DIRECTORY [NAME...]

DIRECTORY is where `npm install @anthropic-ai/claude-code @openai/codex` was run; aider gets an environment of its own.
The model calls the agent's shell tool to list files, then says what it found; the agent must run the call and print
the answer.  Aider has no tools: the model rewrites a file, and aider must write it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.clients.run import environment

ASK = "List the files."
ANSWER = "There is one file: notes.txt."
AGENT_S = 600.0


def call(name: str, arguments: str) -> str:
    return f'I list them.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def claude(npm: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment."""
    model = "scripted/demo"
    variables = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    return [str(npm / "claude"), "-p", ASK], variables


def codex(npm: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment."""
    (home / "config.toml").write_text(
        f'model = "scripted/demo"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    return [str(npm / "codex"), "exec", "--skip-git-repo-check", ASK], {"CODEX_HOME": str(home)}


def aider(npm: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment."""
    command = str(environment("aider").parent / "aider")
    switches = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    model = ["--model", "openai/scripted/demo", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"]
    return [command, *model, *switches, "--message", ASK, "notes.txt"], {}


AGENTS: dict[str, tuple[Callable[..., tuple[list[str], dict[str, str]]], list[str]]] = {
    "claude": (
        claude,
        ["</think>\n\n" + call("Bash", '{"command": "ls", "description": "List files"}'), "</think>\n\n" + ANSWER],
    ),
    "codex": (codex, [call("exec_command", '{"cmd": "ls"}'), ANSWER]),
    "aider": (aider, [f"</think>\n\nI write it down.\n\nnotes.txt\n```\n{ANSWER}\n```\n"]),
}


def check(name: str, npm: Path) -> str:
    """Run one agent; return what went wrong, or nothing."""
    make, texts = AGENTS[name]
    with tempfile.TemporaryDirectory() as directory:
        home, work = Path(directory, "home"), Path(directory, "work")
        home.mkdir()
        work.mkdir()
        (work / "notes.txt").touch()
        files = [home / f"{i}.txt" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.scripted_server", "0", *map(str, files)],
            text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            command, variables = make(npm, url, home)
            done = subprocess.run(
                command, cwd=work, env={**os.environ, "HOME": str(home), **variables}, stdin=subprocess.DEVNULL,
                text=True, capture_output=True, check=False, timeout=AGENT_S,
            )  # fmt: skip
        finally:
            server.kill()
            server.communicate()
        written = (work / "notes.txt").read_text()
    found = written if name == "aider" else done.stdout
    return "" if ANSWER in found else f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def main(directory: str, names: list[str]) -> None:
    """Run the agents; print a row of docs/clients.md for each."""
    npm = Path(directory, "node_modules", ".bin").resolve()
    for name in names or AGENTS:
        command = environment("aider").parent / "aider" if name == "aider" else npm / name
        version = subprocess.run([command, "--version"], text=True, capture_output=True, check=True).stdout.strip()
        error, did = check(name, npm), "a file rewritten" if name == "aider" else "a shell call and an answer"
        print(f"| {name} agent, {version} | {did} | {error or 'works'} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
