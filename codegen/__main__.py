"""`python -m codegen` is the command `codegen`."""

from .cli import main

if __name__ == "__main__":
    main()
