"""`python -m jax_ssd` is the `jax-ssd` command."""

from jax_ssd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
