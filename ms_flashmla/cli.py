"""The command line: `python -m ms_flashmla doctor | tiling | profile | tune | demo`."""

import argparse
import importlib
import sys

_COMMANDS = {  # name -> (module with add_arguments(parser) and run(args) -> exit status, help)
    "doctor": ("doctor", "what is installed and what would run"),
    "tiling": ("tiling_report", "buffers, blocks and the lower bound in time of a problem on a machine"),
    "tune": ("tune", "measure the loops of the projections and the attention paths, and write a tune table"),
    "profile": ("profile", "the Ascend kernel's time on the twin of a chip, and where it goes"),
    "demo": ("demo", "run a checkpoint's layer through the paged cache and hold it to a float64 reference"),
}


def build_parser(commands):
    """The parser with the sub-commands of that list filled in."""
    parser = argparse.ArgumentParser(prog="python -m ms_flashmla", description="Fused multi-head latent attention for MindSpore")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name, (module, text) in _COMMANDS.items():
        command = subparsers.add_parser(name, help=text, description=text)
        if name in commands:
            importlib.import_module(f"{__package__}.{module}").add_arguments(command)
    return parser


def main(argv=None):
    """Runs a sub-command and returns its exit status: 0 well, 1 failed (the reason goes to stderr), 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser({argv[0]} if argv[:1] and argv[0] in _COMMANDS else ())  # the others' imports are left alone
    args = parser.parse_args(argv)
    try:
        return importlib.import_module(f"{__package__}.{_COMMANDS[args.command][0]}").run(args) or 0
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
