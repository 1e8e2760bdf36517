"""The attached framework's driver process: ``python -m robustrl.attach.child MODULE ARGS``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import ModuleType
from typing import Any, Final

from robustrl.attach import patches
from robustrl.attach.adapter import find_adapter
from robustrl.attach.hooks import after_import
from robustrl.attach.session import Session
from robustrl.errors import ConfigError, RobustError

_PR_SET_PDEATHSIG: Final = 1


def pass_environment(session: Session, extra: dict[str, str]) -> None:
    """Lets ``ray.init`` give the session to every worker, also where the cluster was there before us."""
    wanted = session.environment() | extra

    def init(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        runtime_env = dict(kwargs.get("runtime_env") or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **wanted}
        return wrapped(*args, **{**kwargs, "runtime_env": runtime_env})

    def patch(ray: ModuleType) -> None:
        # Whatever else ray.init takes is passed through as it is.
        patches.wrap(ray, "init", init, expect=patches.parameters(vars(ray)["init"]))

    after_import("ray", patch)


def main() -> None:
    # The launcher may be killed without a word; then the job must not go on unseen.
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    module, *args = sys.argv[1:]
    try:
        session = Session.current()
        if session is None:
            raise ConfigError("this is started by `robustrl run`, not by hand")
        adapter = find_adapter(session.adapter)
        adapter.install()
        pass_environment(session, adapter.environment())
        run = adapter.entry(module, args)
    except ConfigError as error:
        print(f"robustrl: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    except RobustError as error:
        print(f"robustrl: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
