"""A model whose answers a test writes: the real engine and pipeline over one stage in memory that samples by a script.

Only the tensors are missing: requests pass scheduler, steps and frames as in service; tokenizer and chat template are
those of the bundled demo model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lucevisor.api.contexts import ModelCard, ModelContext, NotReadyPart, ServerContext
from lucevisor.api.preprocessing import Preprocessor
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestError
from lucevisor.engine.shell import Engine, EngineSettings
from lucevisor.model.gguf_files import open_model, part_paths
from lucevisor.model.values import KvGroup
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import Role
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    CloseSequence,
    Masks,
    OpenSequence,
    PromptLogprobs,
    Sampled,
    SamplingParams,
    Step,
    StepResult,
)
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
MODEL = "scripted/demo"
OPENAI_SAMPLING = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""What a response's usage says where neither the request nor the model has any."""
LOST = RequestError("shard_lost", "group left was killed; send the request again")


@functools.cache
def metadata() -> dict[str, object]:
    return dict(open_model(part_paths(DEMO)).metadata)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


@dataclass
class Seen:
    """What a script knows when it chooses the next token of a sequence."""

    sampling: SamplingParams
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    adapter: str = ""


Scored = tuple[int, list[tuple[int, float]]]  # the token, and ids with their log-probabilities, best first
Script = Callable[[Seen], Scored]


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, parse_special=True)


def say(text: str | Sequence[int], *, end: bool = True) -> Script:
    """Answer with this text (or these ids) and an end of turn; without `end`, with the text again and again."""
    ids = ids_of(text) if isinstance(text, str) else list(text)
    eos = min(tokenizer().eos_ids)

    def script(seen: Seen) -> Scored:
        n = len(seen.generated)
        token = ids[n % len(ids)] if not end or n < len(ids) else eos
        return token, [(token, -0.25), ((token + 1) % 8000, -1.75)]

    return script


def dice(seen: Seen) -> Scored:
    """Draw among 40 tokens by temperature, seed, bias and bans, as the tail of a real pipeline does."""
    n, last = len(seen.generated), (seen.prompt + seen.generated)[-1]
    ids = range(300, 340)
    source = random.Random(f"{n} {last}")
    logits = {i: source.uniform(0, 4) for i in ids}
    logprobs = _log_softmax(logits)
    for i, bias in seen.sampling.logit_bias.items():
        logits[i] = logits.get(i, 0.0) + bias
    for i in seen.sampling.banned:
        logits.pop(i, None)
    best = max(logits, key=lambda i: logits[i])
    if seen.sampling.temperature > 0:
        weights = _log_softmax({i: value / seen.sampling.temperature for i, value in logits.items()})
        draw = random.Random(f"{seen.sampling.seed} {n}")
        best = draw.choices(list(weights), [math.exp(w) for w in weights.values()])[0]
    scores = {best: logprobs.get(best, -math.inf), **logprobs}
    return best, sorted(scores.items(), key=lambda item: -item[1])


def named_logprob(prompt: Sequence[int], token: int) -> float:
    """The log-probability of a token behind a prompt, where a request names it."""
    return -random.Random(f"{list(prompt)} {token}").uniform(0.5, 9.0)


WIDTH = 8


def pooled_of(ids: Sequence[int]) -> list[float]:
    """Numbers that a text of these ids is pooled to: another text has others."""
    source = random.Random(repr(list(ids)))
    return [source.uniform(-3, 3) for _ in range(WIDTH)]


def _log_softmax(logits: dict[int, float]) -> dict[int, float]:
    most = max(logits.values())
    total = most + math.log(sum(math.exp(value - most) for value in logits.values()))
    return {i: value - total for i, value in logits.items()}


class ScriptedStage:
    """The only stage of the pipeline.  `step_s`: how long a step takes; `held`: answer nothing until `release`."""

    def __init__(self) -> None:
        self.script: Script = say("Hello!")
        self.step_s = 0.0
        self.held = False
        self.engine: Engine | None = None
        self.sequences: dict[int, Seen] = {}
        self.opened: list[Seen] = []
        self._waiting: list[Step] = []
        self._connection = Connection(Role.DAEMON)
        self._connection.state = LinkState.READY

    def send(self, message: bytes | Masks, /, *, payload: Sequence[bytearray] = ()) -> None:
        if isinstance(message, Masks):
            return  # the script obeys them
        self._connection.receive(message)
        for frame in self._connection.events():
            assert isinstance(frame.message, Step)
            self._waiting.append(frame.message)
            asyncio.get_running_loop().call_later(self.step_s, self._answer_one)

    def clear(self) -> None:
        """A new process: it has no sequences, and nobody waits for what the old one was asked."""
        self.sequences.clear()
        self._waiting.clear()

    def release(self) -> None:
        self.held = False
        for _ in list(self._waiting):
            self._answer_one()

    def _answer_one(self) -> None:
        if self.held or not self._waiting or self.engine is None:
            return
        self.engine.receive(*self._run(self._waiting.pop(0)))

    def _run(self, step: Step) -> tuple[StepResult, memoryview]:
        for operation in step.operations:
            if isinstance(operation, OpenSequence):
                self.sequences[operation.sequence] = Seen(operation.sampling, adapter=operation.adapter)
                self.opened.append(self.sequences[operation.sequence])
            elif isinstance(operation, CloseSequence):
                del self.sequences[operation.sequence]
        sampled, scored, pooled = [], [], list[float]()
        for piece in step.slices:
            seen = self.sequences[piece.sequence]
            if piece.logprob_targets:
                tops = [[(token, -0.5)][: seen.sampling.n_top_logprobs] for token in piece.logprob_targets]
                logprobs = [-0.5] * len(tops)
                if seen.sampling.logprob_token_ids:
                    at = len(seen.prompt)
                    whole = seen.prompt + piece.tokens
                    logprobs = [
                        named_logprob(whole[: at + i + 1], token) for i, token in enumerate(piece.logprob_targets)
                    ]
                scored.append(PromptLogprobs(piece.sequence, piece.start + 1, logprobs, tops))
            seen.prompt += piece.tokens[: max(0, len(piece.tokens) if not seen.generated else 0)]
            if piece.pooled:
                pooled += pooled_of(seen.prompt)
            if piece.sample:
                token, scores = self.script(seen)
                seen.generated.append(token)
                n, named = seen.sampling.n_top_logprobs, seen.sampling.logprob_token_ids
                if n < 0:
                    sampled.append(Sampled(piece.sequence, token))
                    continue
                tops = [*scores[:n], *((i, named_logprob(seen.prompt, i)) for i in named)]
                sampled.append(Sampled(piece.sequence, token, dict(scores)[token], tops))
        segments = [("pooled", [len(pooled) // WIDTH, WIDTH])] if pooled else []
        result = StepResult(
            step.step_id, 0, sampled, compute_s=0.25, wait_s=0.125, prompt_logprobs=scored, segments=segments
        )
        return result, memoryview(array("f", pooled).tobytes())


def group_status(name: str, state: str, *devices: dict[str, object], **restarts: int) -> dict[str, object]:
    """A group as in the status, with its restarts by reason."""
    figures = {"restart_reasons": restarts, "devices": devices, "spares": [], "rss_bytes": 0}
    where = {"backend": "cpu", "host": "", "path": {"round_trip_s": 2e-4, "bytes_per_s": 0}}
    return {"name": name, "state": state, **where, **figures}


class Rig:
    """Engine, stage and context of one server.  Make it inside the running loop."""

    def __init__(self, *, attach: bool = True, max_queue: int = 8, max_context: int = 512, **fields: object) -> None:
        self.limits = EngineLimits(
            max_sequences=4,
            max_context=max_context,
            prefill_chunk=128,
            max_step_tokens=256,
            kv_groups=frozenset({KvGroup.FULL, KvGroup.RECURRENT}),
            pools=PoolSizes(full_pages=max(64, max_context // 64), window_pages=0, states=4),
        )
        self.stage = ScriptedStage()
        self.waiting_for: list[NotReadyPart] = []
        self.engine = Engine(self.limits, EngineSettings(max_queue=max_queue))
        usual: dict[str, object] = {
            "model": ModelCard(
                name=MODEL,
                created_s=1_700_000_000,
                fingerprint="fp_test",
                path="demo.gguf",
                architecture="qwen35",
                n_parameters=22_400_000,
                facts={"general.basename": "lucevisor-demo", "general.architecture": "qwen35"},
            ),
            "tokenizer": tokenizer(),
            "template": ChatTemplate.from_gguf(metadata()),
            "preprocessor": Preprocessor(metadata()),
            "not_ready": lambda: self.waiting_for,
            "status": lambda: {
                "groups": [group_status("left", "ready", exited=2), group_status("right", "loading")],
                "cluster": None,
                "models": [],
            },
            "engine": self.engine,
            "max_context": self.limits.max_context,
            "max_sequences": self.limits.max_sequences,
            "pooled_width": WIDTH,
        }
        both, shared = usual | fields, {field.name for field in dataclasses.fields(ServerContext)}
        server = ServerContext(**{name: both.pop(name) for name in shared & both.keys()})  # type: ignore[arg-type]
        self.context = ModelContext(server=server, **both)  # type: ignore[arg-type]
        if attach:
            self.attach()

    def attach(self) -> None:
        """Bring the pipeline up."""
        self.stage.clear()
        self.stage.engine = self.engine
        self.engine.attach([self.stage])

    def lose(self) -> None:
        """A shard dies."""
        self.stage.engine = None
        self.engine.detach(LOST)

    @property
    def n_busy(self) -> int:
        """Requests that the engine holds, and pages in use."""
        now = self.engine.statistics()
        return now.running + now.queued + now.pages["full"].used
