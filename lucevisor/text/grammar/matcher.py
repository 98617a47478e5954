"""Compiled grammars over a model's tokens, and matchers that follow one output, on llguidance."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lucevisor.text.llguidance_limits import LIMITS, GrammarError, is_panic
from lucevisor.text.tokenizer import Tokenizer

# Fuel is llguidance's measure of work; its documentation gives 14 to 50 thousand a millisecond.

_TOO_MANY_STATES: Final = "too many states"
_TOO_MUCH: Final = "it takes too much work"
_SLOW_S: Final = 0.002  # checking drafts takes some 10 us


class Matcher:
    """Follows one output.  For any thread, one at a time."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, n_vocab: int) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._taken = array("I")
        self._shares = True  # its lexer, with other outputs
        self._n_replayed = 0
        self._lock = threading.Lock()
        self._slow = False
        self.row_bytes = -(-n_vocab // 8)

    @property
    def n_tokens(self) -> int:
        return len(self._taken)

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        """Take the output's ``tokens`` from ``start`` on, but for those taken before; return the mask of what may
        follow, then one after each draft, ``row_bytes`` each. Raises GrammarError.

        Token t is allowed if bit ``t % 8`` of byte ``t // 8`` is set. Masks after a forbidden draft, or one that ends
        the answer, allow everything."""
        with self._lock:
            try:
                return self._masks(start, tokens, drafts)
            except GrammarError:
                if not self._renewed():
                    raise
                return self._masks(start, tokens, drafts)

    def _masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        self._consume(start, tokens)
        rows = bytearray([0xFF]) * (self.row_bytes * (1 + len(drafts)))
        n_taken = 0
        for index in range(1 + len(drafts)):
            mask = self._matcher.compute_bitmask()
            self._check()
            at = index * self.row_bytes
            rows[at : at + self.row_bytes] = mask[: self.row_bytes]
            if index == len(drafts) or not self._try(drafts[index]):
                break
            n_taken += 1
        self._matcher.rollback(n_taken)
        self._check()
        return rows

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Take tokens as ``masks`` does; return how many ``drafts`` the grammar allows after them, 0 once that took
        long."""
        if self._slow or not self._lock.acquire(blocking=False):
            return 0
        started = time.perf_counter()
        try:
            self._consume(start, tokens)
            return self._matcher.validate_tokens(list(drafts))
        except GrammarError:
            return 0  # the next masks raise the reason
        finally:
            self._lock.release()
            self._slow = time.perf_counter() - started > _SLOW_S

    def _consume(self, start: int, tokens: Sequence[int]) -> None:
        if start > self.n_tokens:
            raise GrammarError(f"tokens {self.n_tokens} to {start} of the output are missing")
        for token in tokens[self.n_tokens - start :]:
            if not self._matcher.consume_token(token):
                raise GrammarError(_sentence(self._matcher.get_error()) or f"token {token} does not follow")
            self._taken.append(token)

    def _renewed(self) -> bool:
        """Continue with a lexer of this output alone when the shared one has collected too many states. A full one may
        refuse a token without a reason, so a refusal by a shared one is tried again."""
        if not self._shares:
            full = _TOO_MANY_STATES in self._matcher.get_error()
            if not full or self.n_tokens - self._n_replayed < self._n_replayed / 8:
                return False
        self._shares = False
        self._matcher = self._grammar.renewed()
        self._n_replayed = self.n_tokens
        return bool(self._matcher.consume_tokens(self._taken.tolist()))

    def _try(self, token: int) -> bool:
        if self._matcher.is_stopped() or not self._matcher.validate_tokens([token]):
            return False
        return self._matcher.consume_token(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_sentence(self._matcher.get_error()))


class Grammar:
    """A compiled grammar.  Copies of a matcher share its lexer, whose states only grow; a full one is replaced."""

    def __init__(self, compile_: Callable[[], LLMatcher], n_vocab: int) -> None:
        self._compile = compile_
        self._matcher = compile_()
        self._n_vocab = n_vocab

    def matcher(self) -> Matcher:
        return Matcher(self, self._matcher.deep_copy(), self._n_vocab)

    def renewed(self) -> LLMatcher:
        """Return llguidance's matcher with a lexer that no other output uses; later outputs share another one."""
        self._matcher = self._compile()
        return self._compile()


class GrammarCompiler:
    """Compiles grammars for one tokenizer; for any thread, one at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the vocabulary before the first request: that holds the GIL for 1 s with 248,320 tokens."""
        if self._tokenizer.eos_ids and self._tokens is None:
            self._tokens = _tokens(self._tokenizer)

    def compile(self, grammar: str) -> Grammar:
        """Compile a grammar in llguidance's notation, without the interpreter lock.  Raises GrammarError."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            if self._tokens is None:
                self._tokens = _tokens(self._tokenizer)
            compiled = Grammar(functools.partial(_compiled, self._tokens, grammar), self._tokenizer.n_vocab)
            _try_out(compiled)
            self._kept[grammar] = compiled
            if len(self._kept) > 32:
                self._kept.popitem(last=False)
            return compiled


def _compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    try:
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise GrammarError(_TOO_MUCH) from None
    if matcher.is_error():
        raise GrammarError(_sentence(matcher.get_error()))
    return matcher


def _sentence(message: str) -> str:
    if "panic" in message or "backtrace" in message:
        return _TOO_MUCH
    return message.replace("<non-verbose/>", "").strip()


def _try_out(grammar: Grammar) -> None:
    """Take one allowed token, which fails for a grammar that is too large: much is built at first use."""
    matcher = grammar.matcher()
    mask = matcher.masks(0, [], [])
    first = next((index for index, byte in enumerate(mask) if byte), None)
    if first is None:
        raise GrammarError("it allows no output")
    token = 8 * first + (mask[first] & -mask[first]).bit_length() - 1
    matcher.masks(0, [], [token])


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = [i for i in range(tokenizer.n_vocab) if not tokenizer.is_text(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def _tokens(tokenizer: Tokenizer) -> LLTokenizer:
    if not tokenizer.eos_ids:
        raise GrammarError("the model's vocabulary has no token that ends an answer, so output cannot be constrained")
    words = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(words, n_vocab=tokenizer.n_vocab, eos_token=sorted(tokenizer.eos_ids))
