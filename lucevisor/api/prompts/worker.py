"""A preprocessing worker: JSON, validation, chat template and tokens of long bodies; preprocessing.py starts it.

Invariant: it processes one body at a time, stays within its memory limit, and exits as soon as the server does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import psutil

from lucevisor.api.errors import ApiError
from lucevisor.api.ports import ApiSettings, ModelCard, Ports
from lucevisor.api.prepared import BodyKind, PreparedRequest
from lucevisor.api.prompts import anthropic, chat, completions, llamacpp, ollama, responses, tokenize
from lucevisor.api.prompts.decoding import decode_object
from lucevisor.api.prompts.preprocessing import (
    ANSWER,
    DEFECT,
    JOB,
    KINDS,
    OUT_OF_MEMORY,
    PREPARED,
    READY,
    REFUSED,
    REPLY,
    SHORT_BYTES,
    PreparedReply,
    Refusal,
    Setup,
)
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.text.llguidance_limits import is_panic
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

_READERS: Final[Mapping[BodyKind, Callable[[dict[str, Any], Ports], PreparedRequest | bytes]]] = {
    "chat": chat.read_chat,
    "completion": completions.read_completion,
    "messages": anthropic.read_messages,
    "count_tokens": anthropic.read_count_tokens,
    "responses": responses.read_response,
    "input_tokens": responses.read_input_tokens,
    "apply_template": chat.read_apply_template,
    "tokenize": tokenize.read_tokenize,
    "detokenize": tokenize.read_detokenize,
    "ollama_chat": ollama.read_ollama_chat,
    "ollama_generate": ollama.read_ollama_generate,
    "ollama_show": ollama.read_show,
    "llama_completion": llamacpp.read_llama_completion,
    "infill": llamacpp.read_infill,
}


def main(socket_fd: int, setup_fd: int) -> None:
    """Serve until the other end of the socket closes."""
    os.nice(10)  # where cores are few, steps go first: the answers that run wait for them
    link = socket.socket(fileno=socket_fd)
    threading.Thread(target=_exit_with_server, args=(link,), daemon=True).start()
    # Processes share the descriptor and so its offset.
    setup = msgspec.msgpack.decode(os.pread(setup_fd, os.fstat(setup_fd).st_size, 0), type=Setup)
    ports = _make_ports(setup)
    _limit_memory(setup.memory_bytes)
    gc.freeze()
    gc.disable()  # collecting among the million objects of one body frees nothing
    link.sendall(REPLY.pack(READY, 0))
    with link.makefile("rb") as incoming:
        while head := incoming.read(JOB.size):
            kind, max_context, size = JOB.unpack(head)
            ports.max_context = max_context
            for part in _reply(_READERS[KINDS[kind]], incoming.read(size), ports):
                link.sendall(part)
            if size > SHORT_BYTES:
                _trim_memory()


def _reply(
    reader: Callable[[dict[str, Any], Ports], PreparedRequest | bytes], body: bytes, ports: Ports
) -> tuple[bytes, ...]:
    try:
        return _encoded(reader(decode_object(body), ports))
    except ApiError as error:
        refusal = Refusal(
            status=error.status, message=error.message, code=error.code, param=error.param, headers=error.headers
        )
        return _framed(REFUSED, msgspec.msgpack.encode(refusal))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # too little may be left to report it
    except Exception:  # last resort: the server logs the bug
        return _framed(DEFECT, traceback.format_exc().encode())
    except BaseException as error:
        if not is_panic(error):
            raise
        return _framed(DEFECT, traceback.format_exc().encode())


def _encoded(read: PreparedRequest | bytes) -> tuple[bytes, ...]:
    if isinstance(read, bytes):
        return _framed(ANSWER, read)
    tools = msgspec.json.encode(read.options.tools)
    options = msgspec.structs.replace(read.options, tools=[])
    reply = PreparedReply(options=options, tools=tools, lengths=[len(ids) for ids in read.prompts])
    return *_framed(PREPARED, msgspec.msgpack.encode(reply)), *(TokenBuffer.of(ids).packed() for ids in read.prompts)


def _framed(outcome: int, record: bytes) -> tuple[bytes, bytes]:
    return REPLY.pack(outcome, len(record)), record


def _make_ports(setup: Setup) -> Ports:
    tokenizer = Tokenizer.from_gguf(setup.metadata)
    tokenizer.bound  # noqa: B018 - build it now, not while a request waits
    ports = Ports(
        model=ModelCard(name=setup.model, created_s=0),
        tokenizer=tokenizer,
        template=ChatTemplate.from_gguf(setup.metadata),
        not_ready=tuple,
        defaults=setup.defaults,
        direct_defaults=setup.direct_defaults,
        efforts=setup.efforts,
        settings=replace(ApiSettings(), normalise=setup.normalise),
        banned=setup.banned,
    )
    ports.grammars.prepare()
    return ports


def _limit_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` beyond its current data size."""
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + more_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _trim_memory() -> None:
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _exit_with_server(link: socket.socket) -> None:
    """Exit as soon as the other end of the socket is closed, whatever the main thread is doing."""
    poll = select.poll()
    poll.register(link.fileno(), select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
