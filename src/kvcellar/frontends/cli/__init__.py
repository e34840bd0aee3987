"""The `kvcellar` command. Each subcommand lives in a module of its own that is imported only when it runs."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import click

from ... import __version__
from ...errors import KVCellarError

COMMANDS = {
    "demo": "Save a real model's cache, reopen it in a new process, and go on generating.",
    "save": "Run a model over a text and keep its cache in a file.",
    "generate": "Go on generating from a saved cache, without a prefill.",
    "append": "Add more text to a saved cache.",
    "info": "Show what an archive holds and how large it is.",
    "verify": "Read and check every part of an archive.",
    "repair": "Save what is intact of a damaged archive into a new one.",
    "calibrate": "Make the profiles that recipes need, from a model and text.",
    "recompress": "Write an archive again under another recipe, without the model.",
    "compact": "Rewrite an archive without the bytes it no longer needs.",
    "restore": "Write the stored cache into a safetensors file.",
    "find": "Find the archive with the longest stored prefix of a prompt.",
    "search": "Find a phrase in an archive, without unpacking it.",
    "measure": "Measure what each head of a model can lose, and what to keep.",
    "bench": "Measure what recipes cost and what they keep.",
}
EPILOG = """\b
Everyday pair:
  kvcellar save --model DIR --text FILE out.kvc
  kvcellar generate out.kvc --prompt "…"
Exit codes: 0 well, 2 usage, 3 not found, 4 damaged or foreign file, 5 newer format, 6 wrong model, tokens or
profile, 7 cache not supported, 8 file system, 9 locked, 10 older format, 11 extra not installed, 1 anything else."""


class Commands(click.Group):
    """Loads a subcommand's module when it is asked for; turns our errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{name}", __name__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["as_json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVCellarError as error:
            report(error, as_json=ctx.meta["as_json"])
            ctx.exit(error.exit_code)


def report(error: KVCellarError, *, as_json: bool) -> None:
    """The error for a person on stderr, or for a program as JSON on stdout."""
    if as_json:
        name = type(error).__name__
        click.echo(json.dumps({"error": {"type": name, "message": str(error), "exit_code": error.exit_code}}))
    else:
        click.echo(f"error: {error}", err=True)


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcellar")
def main() -> None:
    """Keep an LLM's KV cache in a file about as small as its text is predictable."""
