"""The first process of a pod of `ddp dev`: it starts runs on orders, and ends with the last one's exit code.

docs/adr/0048-*.md has the reasons. Each run is an ordinary launcher, a child of this process. Pod 0 takes the orders of
the user, and gives them to the other pods.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ...base.files import log
from ...base.pod import Pod, PodSetupError
from ...contract.command_line import split_python_line
from ...contract.failure_record import Failure, order_causes
from ...contract.names import (
    ENV_LIFELINE_FD,
    ENV_PORT_FILE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    TERMINATION_MESSAGE_LIMIT,
)
from ...contract.pod_end import PodEnd
from ...contract.processes import STOP_SIGNALS, adopt_orphans
from ...contract.records import encode_json, to_json
from ...contract.report import PodReport
from ...contract.run_report import DevRun
from ...failures.termination import build_end, finish, shorten_failure
from ...progress.metrics import MetricsEndpoint
from ...progress.prometheus import format_page
from ...progress.rank_progress import RankReader
from .background import run_in_background
from .contract import REPLACED, Order
from .link import LinkBroken
from .orders import OrderStream, listen
from .peers import Peer, PeerServer
from .processes import RunEnd
from .runs import PodRuns, RunPlan

_SECONDS_FOR_PEERS: Final = 3.0  # that pod 0 waits for the state of its peers before it starts the first run
_SECONDS_FOR_ENDS: Final = 10.0  # that pod 0 waits for peers without a connection after its own run has ended
_SECONDS_TO_JOIN: Final = 60.0  # a spare that was called earlier has reached the rendezvous
_SECONDS_OF_NOTICE: Final = 60.0
_SECONDS_FOR_REPORT: Final = 5.0
_MOST_FORMER: Final = 10


def hold(pod: Pod, command: list[str], signals: list[int]) -> int:
    """Hold the pod. ``command``: of the first run; ``signals``: those received so far. Returns the exit code."""
    adopt_orphans()
    holder = Leader(pod, command) if pod.node == 0 else Holder(pod, command)
    return asyncio.run(holder.run(signals))


class Holder:
    """Holds a pod other than pod 0."""

    def __init__(self, pod: Pod, command: list[str]) -> None:
        self.pod = pod
        self.runs = PodRuns(pod, command, self.on_end)
        self._over: asyncio.Future[int] | None = None  # the signal that ends the pod, 0 for a release
        self._was_running = False  # when it was decided
        self._server = PeerServer(pod, self.runs, lambda: self.end(0))

    async def run(self, signals: Sequence[int]) -> int:
        """Run the pod to its end. Returns the exit code."""
        self._over = asyncio.get_running_loop().create_future()
        self._watch_signals(signals)
        self._watch_owner()
        self._serve_report()
        await self.begin()
        number = await self._over
        if number:
            self.runs.signal(number)
        await self.runs.wait()
        await self.runs.close()
        return finish(self._find_end(number))

    async def begin(self) -> None:
        """Take orders, and start the first run."""
        await self._server.listen()
        if self.first_plan.run:
            await self.runs.start(self.first_plan)

    @property
    def first_plan(self) -> RunPlan:
        """The first run. Its number is 0 if the code of a former attempt is lost: then there is nothing to run."""
        assert self.pod.dev is not None
        return dataclasses.replace(self.runs.plan, run=0 if self.pod.dev.runs else 1)

    def end(self, number: int) -> None:
        """End the pod. ``number``: of a signal; 0: as its last run has ended."""
        if self._over is not None and not self._over.done():
            self._was_running = self.runs.is_running
            self._over.set_result(number)
        elif number:
            self.runs.signal(number)

    def on_end(self, end: RunEnd) -> None:
        """Handle the end of a run in this pod."""
        run_in_background(self._server.report_end())

    @property
    def phase(self) -> str:
        """The phase of this pod while no launcher reports one."""
        return "Starting" if self.runs.is_running else "Held"

    def describe(self) -> DevRun | None:
        """Return the newest run for the pod's report; only pod 0 has it."""
        return None

    def _watch_signals(self, signals: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        for stop_signal in STOP_SIGNALS:
            loop.add_signal_handler(stop_signal, self.end, stop_signal)
        loop.add_signal_handler(signal.SIGUSR1, self.runs.signal, signal.SIGUSR1)
        for number in signals:
            self.end(number)

    def _watch_owner(self) -> None:
        """End with the process that owns the pod (`ddp run`)."""
        descriptor = int(os.environ.pop(ENV_LIFELINE_FD, None) or -1)
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            asyncio.get_running_loop().add_reader(descriptor, os._exit, 137)

    def _find_end(self, number: int) -> PodEnd:
        """Return how the pod ends. ``number``: see ``end``."""
        last = self.runs.end
        if last is not None and (self._was_running or (last.code == EXIT_OK and not number)):
            return last.end
        if number:
            return build_end(
                self.pod.node, EXIT_PREEMPTED, "stopped by a signal while the pod was held between two runs"
            )
        if last is None:
            return build_end(self.pod.node, EXIT_USER_ERROR, "released without a run")
        # The user has seen this failure, and no restart by the operator is wanted.
        return dataclasses.replace(last.end, container_exit_code=EXIT_USER_ERROR)

    # -- the report

    def _serve_report(self) -> None:
        host = "127.0.0.1" if self.pod.local else ""
        _HeldEndpoint(self).serve_pod(self.pod.metrics_port, host, os.environ.pop(ENV_PORT_FILE, None))

    def build_page(self, path: bytes) -> tuple[str, bytes]:
        """Return status and body of the pod's report, or of its page for Prometheus."""
        page = self.read_page(path.decode(), "")
        if page is not None:
            return "200 OK", page
        report = self._build_report()
        if path == b"/report":
            return "200 OK", encode_json(report)
        return "200 OK", format_page(report, {}).encode("utf-8", "replace")

    def read_page(self, path: str, query: str) -> bytes | None:
        """Return a page of the present run; None: there is no run, or it does not serve that page.

        Requests with a query wait, or change the state of the run: a held job has no witnesses of lost nodes.
        """
        port = self.runs.port
        if port is None or query:
            return None
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            return self._pass_on(port, path)
        return None

    def _build_report(self) -> PodReport:
        """Return the report on a run that has ended."""
        last = self.runs.end.end if self.runs.end is not None else PodEnd()
        ranks = (last.progress,) if last.progress is not None else ()
        return PodReport(phase=self.phase, ranks=ranks, restarts=last.restarts, dev=self.describe())

    def _pass_on(self, port: int, path: str) -> bytes | None:
        """Return the page of the present run. Raises: OSError, ValueError."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS_FOR_REPORT)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        if response.status != http.client.OK:
            return None
        run = self.describe()
        if path != "/report" or run is None:
            return body
        return json.dumps({**json.loads(body), "dev": to_json(run)}).encode()


class _HeldEndpoint(MetricsEndpoint):
    """The endpoint of a held pod, whose pages come from the holder."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(RankReader(""), lambda ranks: PodReport(), holder.read_page)
        self._holder = holder

    def build_page(self, path: bytes) -> tuple[str, bytes]:
        """Return status and body of a page."""
        return self._holder.build_page(path)


class Leader(Holder):
    """Holds pod 0: it carries out orders in all pods, and ends the job when it was not used for long."""

    def __init__(self, pod: Pod, command: list[str]) -> None:
        super().__init__(pod, command)
        pods = max(pod.max_nodes, pod.nodes + pod.spares)
        self._peers = [Peer(pod, index, self._on_peer) for index in range(1, pods)]
        self._waiting: list[OrderStream] = []  # for the end of the run
        self._is_busy = False  # with an order
        self._is_replacing = False  # the present run by another one
        self._adopting = asyncio.Lock()
        self._begun = asyncio.Event()
        self._is_stopped = False  # by an order, rather than alone
        self._is_known_by_spares = False  # the newest run, and no pod that trains in it has been seen
        self._called: dict[Peer, float] = {}  # spares of the present run, and when
        self._recalled: set[Peer] = set()
        self._result = ""
        self._failure: Failure | None = None
        self._former: deque[PodReport] = deque(maxlen=_MOST_FORMER)
        self._release_at: float | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def begin(self) -> None:
        """Take orders, and start the first run, or take part in the one of the peers."""
        await listen(self.pod.runtime, self._carry_out)
        self._tasks += [asyncio.create_task(peer.follow()) for peer in self._peers]
        self._tasks.append(asyncio.create_task(self.runs.prepare(1)))
        if self._peers:
            seen = [asyncio.create_task(peer.seen.wait()) for peer in self._peers]
            await asyncio.wait(seen, timeout=_SECONDS_FOR_PEERS)
        async with self._adopting:
            pass  # the run of a peer
        await self._adopt_of_spare()
        self._begun.set()
        if self.runs.plan.run:
            return  # of a peer
        if self.first_plan.run:
            await self._start_run(self.first_plan)
        else:
            log("the code of the last run was lost with the former pods; `ddp rerun` sends it again")
            self._hold()

    @property
    def phase(self) -> str:
        """The phase of this pod while no launcher reports one."""
        if self._release_at is not None:
            return "Held"
        return "Done" if self.runs.end is not None else "Starting"

    def describe(self) -> DevRun | None:
        """Return the newest run for the pod's report."""
        failure = None if self._failure is None else shorten_failure(self._failure, TERMINATION_MESSAGE_LIMIT)
        return DevRun(
            run=self.runs.plan.run,
            digest=self.runs.plan.digest,
            started=self.runs.started,
            ended=self.runs.ended if self._result else None,
            result=self._result,
            failure=failure,
            release_at=self._release_at,
        )

    # -- peers

    async def _on_peer(self, peer: Peer) -> None:
        """Compare a peer's state with this pod's."""
        state = peer.state
        if state is None:
            await self._call_spares()
            return
        if state.spare and not self._begun.is_set():
            return  # the pods that train know whether the run goes on
        is_newer = state.plan.run > self.runs.plan.run or self._goes_on_in(peer)
        if is_newer and not self._is_busy:
            async with self._adopting:
                await self._adopt(peer, state.plan, running=state.running)
        elif self._begun.is_set() and not self._is_busy:
            await self._update(peer)
        self._conclude()

    async def _adopt(self, peer: Peer, plan: RunPlan, *, running: bool) -> None:
        """Take the run of a peer, which this pod has replaced another one for."""
        # Nothing has waited since ``_on_peer`` read the flag: the lock is free whenever none is adopted. No test
        # lets two peers bring a run at once.
        self._is_busy = True
        try:
            if not self.runs.has_code(plan.digest):
                path = os.path.join(self.pod.runtime, "receiving")
                await peer.fetch_code(path, plan.digest)
                self.runs.keep_code(path, plan.digest, checked=False)
            await self.runs.stop()
            if plan.run > 1:
                log(f"this pod takes run {plan.run} from pod {peer.index}")
            if running:
                await self._start_run(plan)
            else:
                self._is_known_by_spares = peer.state is not None and peer.state.spare
                self.runs.adopt(plan)
                self._hold()
        except (LinkBroken, PodSetupError, OSError) as error:
            log(f"run {plan.run} of pod {peer.index} cannot be taken over: {error}")
        finally:
            self._is_busy = False

    async def _adopt_of_spare(self) -> None:
        """Take the newest run of the spares, if no pod that trains in it has been seen. One may come later."""
        for peer in self._peers:
            if peer.state is not None and peer.state.spare and peer.state.plan.run > self.runs.plan.run:
                await self._adopt(peer, peer.state.plan, running=False)
        for peer in self._peers:  # that has come while the code was fetched
            if self._goes_on_in(peer):
                await self._adopt(peer, self.runs.plan, running=True)

    def _goes_on_in(self, peer: Peer) -> bool:
        """Return whether a peer trains in the newest run, which this pod has from spares and holds."""
        state = peer.state
        is_held = self._is_known_by_spares and not self.runs.is_running
        return is_held and state is not None and state.running and state.plan == self.runs.plan

    async def _call_spares(self) -> None:
        """Start the run in spares in place of lost pods, so that one waits at the rendezvous, where it notices a loss.

        They are chosen anew each time: while one starts, others are called or lost, or the run ends.
        """
        while (spare := self._choose_spare()) is not None:
            assert spare.state is not None
            # Before anything waits: it is called once, and an order that comes meanwhile stops it too.
            spare.state = dataclasses.replace(spare.state, spare=False, running=True, end=None)
            log(f"run {self.runs.plan.run}: pod {spare.index} comes to the rendezvous as a spare")
            self._called[spare] = time.time()
            with contextlib.suppress(LinkBroken):  # another one is called then
                await spare.start(self.runs.plan)

    async def _recall_spares(self) -> None:
        """End the run in the spares that were called too late to join it: nobody closes the rendezvous for them.

        They count as spares that have waited there.
        """
        plan = self.runs.plan
        ended = self.runs.ended or time.time()
        late = [peer for peer, called in self._called.items() if called > ended - _SECONDS_TO_JOIN]
        for peer in late:
            if peer.state is not None and peer.state.running:
                self._recalled.add(peer)
                with contextlib.suppress(LinkBroken):
                    await peer.request("stop")
                    if plan != self.runs.plan or self._is_busy:
                        return  # an order has come
                    await peer.note_as_spare(plan)
        self._conclude(without_lost=True)

    def _choose_spare(self) -> Peer | None:
        """Return the spare to call next; None: enough pods take part in the run, or there is no spare."""
        if not self.runs.is_running or self._is_busy:
            return None
        states = [(peer, peer.state) for peer in self._peers if peer.state is not None]
        spares = [peer for peer, state in states if state.spare]
        is_complete = len(states) - len(spares) >= self._others_in_run
        return None if is_complete else next(iter(spares), None)

    @property
    def _others_in_run(self) -> int:
        """The number of other pods that a run starts in: of spares only one, as each costs a start of torchrun."""
        return self.pod.nodes if self.pod.spares else len(self._peers)

    async def _update(self, peer: Peer) -> None:
        """Give a pod that has replaced another one the newest run. Raises: LinkBroken."""
        state = peer.state
        plan = self.runs.plan
        if state is None or (state.plan == plan and (state.running == self.runs.is_running or state.end is not None)):
            return
        if state.plan.digest != plan.digest and os.path.exists(self.runs.archive_of(plan.digest)):
            await peer.send_code(self.runs.archive_of(plan.digest), plan.digest)
        await peer.start(plan, hold=not self.runs.is_running)

    # -- orders

    async def _carry_out(self, order: Order, stream: OrderStream) -> None:
        await self._begun.wait()
        if order.kind == "follow":
            await self._follow(stream)
            return
        if order.kind == "list":
            for report in self._former:
                stream.send("former", report=report)
            stream.send("listed")
            return
        if self._is_busy:
            stream.send(
                "refused",
                message="the pods carry out another order",
                remedy="wait until it is done, and try again; nothing has changed",
            )
            return
        # Between the question and this line nothing may wait: two orders would replace the run at the same time.
        self._is_busy = True
        try:
            is_done = await self._execute(order, stream)
        finally:
            self._is_busy = False
            if not self.runs.is_running and self._release_at is None and order.kind != "release":
                self._hold()
        if order.kind == "release":
            self.end(0)
            return
        if is_done:
            await self._call_spares()  # for those that were lost meanwhile
            await self._follow(stream)

    async def _execute(self, order: Order, stream: OrderStream) -> bool:
        """Carry out an order, up to the start of its run. Returns whether it was not refused."""
        if order.kind == "run":
            return await self._replace_run(order, stream)
        self._is_stopped = self.runs.is_running
        await self._stop_all()
        stream.send("stopped", run=self.runs.plan.run)
        if order.kind == "release":
            await self._release_peers()
            stream.send("released", run=self.runs.plan.run, result=self._result)
        return True

    async def _replace_run(self, order: Order, stream: OrderStream) -> bool:
        try:
            command = self._replace_arguments(order)
            digest = await self._deliver(order, stream)
        except (ValueError, LinkBroken, OSError, EOFError) as error:
            stream.send("refused", message=str(error) or "the archive ended early", remedy="nothing has changed")
            return False
        except PodSetupError as error:
            stream.send("refused", message=str(error), remedy=error.hint)
            return False
        lost = self.pod.dev.runs if self.pod.dev is not None else 0
        plan = RunPlan(max(order.run, self.runs.plan.run + 1, lost + 1), command, digest)
        self._is_stopped = self.runs.is_running
        self._is_replacing = True
        await self._stop_all()
        # Now, as a peer may report its end later, when it would be taken for the end of the new run.
        self._conclude(without_lost=True)
        self._is_replacing = False
        stream.send("stopped", run=self.runs.plan.run)
        log(f"run {plan.run}: code {plan.digest[:12] or 'of the image'}, {' '.join(plan.command)}")
        present = [peer for peer in self._peers if peer.state is not None]
        called = present[: self._others_in_run]
        spares = present[self._others_in_run :]
        starts = [peer.start(plan) for peer in called] + [peer.note_as_spare(plan) for peer in spares]
        await asyncio.gather(*starts, return_exceptions=True)
        await self._start_run(plan)
        stream.send("started", run=plan.run, pods=len(called) + 1)
        return True

    async def _start_run(self, plan: RunPlan) -> None:
        """Start a run in this pod. Its result is open from then on, and the pods are no longer held.

        The report on the former run is kept for `ddp report --run`.

        In this order: until the run has started, ``runs.end`` is that of the former one, whose result must stay, or
        ``_conclude`` would take it for the end of the new one.
        """
        if self._result:
            self._former.append(self._build_report())
        await self.runs.start(plan)
        self._cancel_release()
        self._is_stopped = False
        self._is_known_by_spares = False
        self._called.clear()
        self._recalled.clear()
        self._result = ""
        self._failure = None

    def _replace_arguments(self, order: Order) -> tuple[str, ...]:
        """Return the command of a new run. Raises: ValueError."""
        command = self.runs.plan.command
        if not order.replaces_arguments:
            return command
        if self.pod.program:
            raise ValueError(f"{command[0]} is no Python, so its arguments cannot be replaced")
        own = len(split_python_line(command).args)
        return (*command[: len(command) - own], *order.arguments)

    async def _deliver(self, order: Order, stream: OrderStream) -> str:
        """Receive the code of an order and give it to all pods. Returns its digest.

        Raises: ValueError, EOFError, OSError, LinkBroken, PodSetupError.
        """
        absent = [peer.index for peer in self._peers if peer.state is None]
        if absent and not self.pod.elastic:
            raise LinkBroken(f"pod {absent[0]} cannot be reached")
        if not order.size:
            return self.runs.plan.digest
        if self.pod.code is None:
            raise ValueError(
                "the job has no spec.code, so that its pods have no folder for code; start it from a folder"
            )
        path = os.path.join(self.pod.runtime, "receiving")
        await stream.save_archive(path, order.size)
        await asyncio.to_thread(self.runs.keep_code, path, order.digest, checked=False)
        stream.send("received", run=order.run)
        archive = self.runs.archive_of(order.digest)
        present = [peer for peer in self._peers if peer.state is not None]
        await asyncio.gather(*(peer.send_code(archive, order.digest) for peer in present))
        stream.send("sent", pods=len(present) + 1)
        return order.digest

    async def _stop_all(self) -> None:
        """End the present run in all pods, within the grace period of its ranks."""
        running = [peer for peer in self._peers if peer.state is not None and peer.state.running]
        await asyncio.gather(self.runs.stop(), *(peer.request("stop") for peer in running), return_exceptions=True)

    async def _release_peers(self) -> None:
        present = [peer for peer in self._peers if peer.state is not None]
        await asyncio.gather(*(peer.request("release") for peer in present), return_exceptions=True)

    async def _follow(self, stream: OrderStream) -> None:
        """Report the end of the run to the sender of an order."""
        self._waiting.append(stream)
        self._conclude()
        await stream.over.wait()

    # -- the end of a run

    def on_end(self, end: RunEnd) -> None:
        """Handle the end of a run in this pod."""
        self._conclude()
        asyncio.get_running_loop().call_later(_SECONDS_FOR_ENDS, self._conclude_without_lost, self.runs.plan.run)

    def _conclude_without_lost(self, run: int) -> None:
        """Conclude a run without its lost peers, unless another has started: that one waits for its own peers."""
        if run == self.runs.plan.run:
            self._conclude(without_lost=True)
            if not self._result and not self._is_busy:
                run_in_background(self._recall_spares())

    def _conclude(self, *, without_lost: bool = False) -> None:
        """Record how the run has ended, once it has in all pods. ``without_lost``: or in those with a connection."""
        own = self.runs.end
        states = [peer.state for peer in self._peers if peer.state is not None]
        has_lost = any(peer.state is None and peer.seen.is_set() for peer in self._peers) and not without_lost
        if own is None or has_lost or any(state.running for state in states):
            return
        if not self._result:
            others = [peer.state for peer in self._peers if peer.state is not None and peer not in self._recalled]
            ends = [own, *(state.end for state in others if state.end is not None)]
            failures = [end.end for end in ends if end.code != EXIT_OK]
            if self.pod.success_policy == "RankZero" and own.code == EXIT_OK:
                failures = []
            self._failure = min(failures, key=order_causes) if failures and not self._is_stopped else None
            self._result = "Stopped" if self._is_stopped else "Failed" if failures else "Succeeded"
            if not self._is_busy:
                self._hold()
        for stream in self._waiting:
            message = REPLACED if self._is_replacing else ""
            stream.send("ended", run=self.runs.plan.run, result=self._result, failure=self._failure, message=message)
            stream.over.set()
        self._waiting.clear()

    def _hold(self) -> None:
        """Release the pods after spec.dev.holdSeconds from now, unless another run starts."""
        assert self.pod.dev is not None
        self._cancel_release()  # a second timer would release the pods during a later run
        self._release_at = time.time() + self.pod.dev.hold_seconds
        self._releasing = asyncio.create_task(self._release_later(self.pod.dev.hold_seconds))
        ended = f"run {self.runs.plan.run} has ended ({self._result})" if self._result else "no run yet"
        log(f"{ended}; the pods are held for {self.pod.dev.hold_seconds:g} s, or until `ddp rerun` or `ddp release`")

    def _cancel_release(self) -> None:
        self._release_at = None
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None

    async def _release_later(self, seconds: float) -> None:
        notice = min(_SECONDS_OF_NOTICE, seconds / 10)
        await asyncio.sleep(seconds - notice)
        log(f"the pods end in {notice:g} s: no run for spec.dev.holdSeconds; `ddp rerun` keeps them")
        await asyncio.sleep(notice)
        if self._is_busy:  # an order came at the last moment: it keeps the pods, even if it is refused
            self._hold()
            return
        self._is_busy = True  # before the first peer is released: an order that comes meanwhile is refused
        log("the pods end: no run for spec.dev.holdSeconds")
        await self._release_peers()
        self.end(0)
