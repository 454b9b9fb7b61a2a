"""`python -m instep.check train.py`: the same as `instep check train.py`."""

import argparse
import sys

from instep.check.command import add_command

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="instep")
    add_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["check", *sys.argv[1:]])
    sys.exit(arguments.command(arguments))
