"""`python -m thinwire` and `torchrun -m thinwire`: the command line."""

from thinwire.tools.cli import main

if __name__ == "__main__":
    main()
