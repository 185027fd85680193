"""`zombi doctor`: whether this machine can run the platform, and what to do where it cannot.

It looks and changes nothing. A check is ok, a warning (works, but not as well or not yet) or
a failure (cannot work); failures make the exit code 1.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check this machine and say what to do."""
    from zombi_platform.cli.checks import FAIL, WARN, run_checks

    results = run_checks(os.environ)
    counts = Counter(result.status for result in results)
    if as_json:
        import json

        typer.echo(json.dumps({"checks": [asdict(result) for result in results]}))
    else:
        from rich.console import Console
        from rich.markup import escape

        console = Console(highlight=False, soft_wrap=True)
        colours = {FAIL: "red", WARN: "yellow"}
        for result in results:
            colour = colours.get(result.status, "green")
            console.print(
                f"[{colour}]{result.status:4}[/] {result.name}: {escape(result.found)}"
                + (f"\n     → {escape(result.todo)}" if result.todo else "")
            )
        console.print(f"{counts[FAIL]} failed, {counts[WARN]} warnings")
    raise typer.Exit(1 if counts[FAIL] else 0)
