"""What blocks, in a thread of its own that nobody has to wait for.

In: a function that blocks, such as a call to a trainer's ranks. Out: its result, or what it raised. `asyncio.to_thread`
is not used here: when a synchronisation is interrupted, `asyncio.run` waits five minutes for its threads, and Python
waits for them at its end for as long as they take. A thread from here is left behind, and goes with the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress


async def in_thread[**P, T](function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await `function(*args, **kwargs)`. Cancelled, it goes on unheard."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            with suppress(InvalidStateError):  # nobody waits any more
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(result)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return await asyncio.wrap_future(future)
