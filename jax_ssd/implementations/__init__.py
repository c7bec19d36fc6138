"""Implementations: modules with supports(problem, device), configuration(problem, device) and run(problem, arrays)."""
