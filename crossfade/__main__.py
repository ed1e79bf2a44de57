"""`python -m crossfade` is the command line, e.g. behind torchrun."""

from crossfade.commands.cli import main

if __name__ == "__main__":
    main()
