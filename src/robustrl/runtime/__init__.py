"""Runtime: where members live, and what their own code holds.

`Launcher` starts a job, `LocalRuntime` starts and ends its processes, and the guards attach a member's loop to it.
"""
