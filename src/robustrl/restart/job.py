"""What a job is made of."""

from __future__ import annotations

from pathlib import Path

import msgspec

from robustrl.config import RobustConfig
from robustrl.errors import ConfigError
from robustrl.roles import STANDBY, SUPERVISOR, TRAINER, Member, Role, check_role


class RoleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One role: how many members, and the command that each is started with."""

    role: Role
    command: tuple[str, ...]
    count: int = 1
    serves: tuple[Role, ...] = ()
    """For standbys: the roles that they can be promoted to."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job as the launcher writes it down and each supervisor reads it."""

    roles: tuple[RoleSpec, ...]
    config: RobustConfig = RobustConfig()
    env: dict[str, str] = {}
    """Set for every member on top of the launcher's environment."""

    def check(self) -> None:
        seen = set()
        for spec in self.roles:
            check_role(spec.role)
            if spec.role in seen:
                raise ConfigError(f"role {spec.role} is given twice")
            if spec.role == SUPERVISOR:
                raise ConfigError("the supervisor is not a role of the job", do="The launcher starts it by itself.")
            seen.add(spec.role)
            if spec.count < 0 or (spec.count > 0 and not spec.command):
                raise ConfigError(f"role {spec.role} needs a command and a count of at least 0")
        if TRAINER not in seen:
            raise ConfigError("the job has no trainer", why="it ends when its trainer has finished")
        self.config.check()

    def members(self) -> tuple[Member, ...]:
        return tuple(Member(spec.role, index) for spec in self.roles for index in range(spec.count))

    def role(self, role: Role) -> RoleSpec:
        for spec in self.roles:
            if spec.role == role:
                return spec
        raise ConfigError(f"the job has no role {role!r}", why=f"it has {', '.join(s.role for s in self.roles)}")

    def standby_for(self, role: Role) -> bool:
        return any(spec.role == STANDBY and role in spec.serves for spec in self.roles)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        try:
            spec = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read the job from {path}", why=str(error)) from error
        spec.check()
        return spec
