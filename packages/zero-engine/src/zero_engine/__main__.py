"""`python -m zero_engine` is the `zero` command."""

from .cli import main

raise SystemExit(main())
