"""The checks that every op gets from its spec: each is ``check_*(spec, ...)`` and raises AssertionError with what was
found."""
