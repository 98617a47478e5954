"""Event loops for tests of asyncio links."""

import asyncio

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine in a loop of either kind; an exception in a callback fails the test unless it is expected."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(main, expect_unhandled=()):
        unhandled = []

        async def watched():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["exception"]))
            async with asyncio.timeout(100):
                await main

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched())
        assert [type(error) for error in unhandled] == list(expect_unhandled)

    return run
