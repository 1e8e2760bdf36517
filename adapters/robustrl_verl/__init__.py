"""robustrl attached to verl's fully_async trainer. `docs/verl.md` says what it does and which seams it uses.

Importing it imports neither verl nor Ray; verl loads `robustrl_verl.plugin` in each of its processes.
"""
