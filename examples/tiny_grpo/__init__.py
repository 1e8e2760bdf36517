"""The reference job: asynchronous GRPO in plain torch, made of processes that robustrl keeps alive."""
