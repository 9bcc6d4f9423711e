"""Run the command as ``python -m reshard.cli``."""

from reshard.cli.main import main

if __name__ == "__main__":
    main(prog_name="zreshard")
