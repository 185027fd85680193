"""Documents and code say the same."""

from __future__ import annotations

from pathlib import Path

from zombi_platform.settings import render_env_example, render_table

ROOT = Path(__file__).parent.parent


def test_every_setting_is_documented_as_it_is() -> None:
    assert (ROOT / "docs/configuration.md").read_text().endswith("\n\n" + render_table())
    assert (ROOT / ".env.example").read_text() == render_env_example()
