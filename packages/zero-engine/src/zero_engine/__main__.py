"""`python -m zero_engine` is the `zero` command."""

from ._cli import main

raise SystemExit(main())
