"""The supervisor's process: ``python -m robustrl.runtime.supervise RUN_DIR INCARNATION SOCKET_FD LIFELINE_FD``.

The launcher starts it, holds its listening socket open over restarts, and holds the other end of the lifeline: what is
written to it is the supervisor's pulse, and its end is the launcher's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from robustrl import events
from robustrl.restart import JobSpec, Journal, Supervisor
from robustrl.roles import SUPERVISOR, Identity, Member
from robustrl.runtime.local import LocalRuntime
from robustrl.wire import Address, Secret

PULSE_S = 0.25
GAVE_UP_EXIT = 3
"""The job failed and everything of it is ended. A supervisor that crashes exits with 1, as Python does."""


async def _pulse(lifeline: socket.socket, supervisor: Supervisor) -> None:
    """Tells the launcher that this loop turns; ends the job when nobody is there to be told."""
    while True:
        try:
            lifeline.send(b".")
        except BlockingIOError:
            pass
        except OSError:
            supervisor.stop("failed", "the launcher is gone (its terminal closed, or it was killed)")
            return
        await asyncio.sleep(PULSE_S)


async def supervise(run_dir: Path, incarnation: int, sock: socket.socket, lifeline: socket.socket) -> int:
    me = Identity(Member(SUPERVISOR), incarnation)
    log = events.EventLog(run_dir / "events.jsonl", me)
    log.emit(
        events.MemberMoved(
            member=str(me.member), incarnation=incarnation, before="starting", after="serving", pid=os.getpid()
        )
    )
    log.emit(events.MemberReady(member=str(me.member), incarnation=incarnation, milestone="attached"))
    job = JobSpec.load(run_dir / "job.json")
    host, port = sock.getsockname()[:2]
    journal = Journal(run_dir / "supervisor.db")
    supervisor = Supervisor(
        job=job,
        run_dir=run_dir,
        me=me,
        runtime=LocalRuntime(run_dir, Address(host, port), job.env),
        journal=journal,
        server_socket=sock,
        secret=Secret.read(run_dir / "secret"),
        emit=log.emit,
    )
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, supervisor.stop, "failed", "the supervisor was asked to stop (SIGTERM)"
    )
    pulse = asyncio.create_task(_pulse(lifeline, supervisor))
    try:
        state = await supervisor.run()
    finally:
        pulse.cancel()
        await asyncio.gather(pulse, return_exceptions=True)
        journal.close()
        log.close()
    return 0 if state.outcome == "finished" else GAVE_UP_EXIT


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # The terminal's Ctrl-C goes to the launcher, which asks us to stop in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_dir, incarnation, socket_fd, lifeline_fd = Path(argv[0]), int(argv[1]), int(argv[2]), int(argv[3])
    sock = socket.socket(fileno=socket_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    for one in (sock, lifeline):
        one.setblocking(False)
        one.set_inheritable(False)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(supervise(run_dir, incarnation, sock, lifeline))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
