"""The same for asyncio: every method of `Client` and `Job` as a coroutine, and every iterator as an asynchronous one.

A call runs in a thread of its own, a daemon: a wait that is cancelled, or a program that ends, does not wait for it.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar, cast

from ddp_operator.api.status import Phase, Progress, Status
from ddp_operator.client.backend import Object
from ddp_operator.client.client import Client
from ddp_operator.client.job import Job

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
_END: Final = object()


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that blocks. Raises: what it raises."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if future.done():
            return  # nobody waits for it any more
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop has ended

    threading.Thread(target=run, daemon=True, name=f"ddp {getattr(function, '__name__', '')}").start()
    return await future


async def _iterate(items: Iterator[R]) -> AsyncIterator[R]:
    while (item := await in_thread(next, items, _END)) is not _END:
        yield cast(R, item)


class _Twin(Generic[S]):
    """What has the coroutines; ``sync`` has the methods that they call."""

    def __init__(self, sync: S) -> None:
        self.sync = sync

    def __repr__(self) -> str:
        return f"<async {self.sync!r}>"


def _method(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[_Twin[S], P], Coroutine[Any, Any, R]]:
    async def call(self: _Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await in_thread(method, self.sync, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


def _iterator(method: Callable[Concatenate[S, P], Iterator[R]]) -> Callable[Concatenate[_Twin[S], P], AsyncIterator[R]]:
    def call(self: _Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        return _iterate(method(self.sync, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def _job(
    method: Callable[Concatenate[S, P], Job],
) -> Callable[Concatenate[_Twin[S], P], Coroutine[Any, Any, "AsyncJob"]]:
    async def call(self: _Twin[S], /, *args: P.args, **kwargs: P.kwargs) -> "AsyncJob":
        return AsyncJob(await in_thread(method, self.sync, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class _Property(Generic[S, R]):
    """A property that has to be read: it is awaited."""

    def __init__(self, read: Callable[[S], R]) -> None:
        self._read = read

    def __get__(self, twin: _Twin[S], owner: type) -> Coroutine[Any, Any, R]:
        return in_thread(self._read, twin.sync)


class AsyncJob(_Twin[Job]):
    """A `Job` whose methods and properties are awaited, and whose logs and changes are iterated by ``async for``."""

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.sync.name

    @property
    def resource(self) -> Object:
        """The resource as it was read last."""
        return self.sync.resource

    status = _Property[Job, Status](lambda job: job.status)
    phase = _Property[Job, Phase](lambda job: job.phase)
    progress = _Property[Job, Progress](lambda job: job.progress)
    refresh = _job(Job.refresh)
    changes = _iterator(Job.changes)
    wait = _method(Job.wait)
    metrics = _method(Job.metrics)
    report = _method(Job.report)
    logs = _iterator(Job.logs)
    lines = _iterator(Job.lines)
    why = _method(Job.why)
    links = _Property[Job, tuple[str, ...]](lambda job: job.links)
    scale = _method(Job.scale)
    suspend = _method(Job.suspend)
    resume = _method(Job.resume)
    delete = _method(Job.delete)
    wait_until_gone = _method(Job.wait_until_gone)


class AsyncClient(_Twin[Client]):
    """A `Client` whose methods are awaited; it is made with the same arguments."""

    def __init__(
        self,
        *,
        backend: Literal["cluster", "local"] = "cluster",
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        runs_dir: str | Path = "ddp-runs",
    ) -> None:
        login = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        super().__init__(Client(backend=backend, runs_dir=runs_dir, **login))

    train = _job(Client.train)
    submit = _job(Client.submit)
    get = _job(Client.get)

    async def list(self) -> Sequence[AsyncJob]:
        """Return the jobs of the namespace, or the runs on this machine, oldest first. Raises: ClientError."""
        return [AsyncJob(job) for job in await in_thread(self.sync.list)]
