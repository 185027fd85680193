"""Failpoints act at their pass, once, and are refused when misspelt."""

from __future__ import annotations

import pytest

from zombi_platform.errors import SettingsError
from zombi_platform.failpoints import FailpointError, arm, failpoint


def test_a_failpoint_acts_at_its_pass_and_only_once() -> None:
    arm("here=error:2")
    failpoint("here")
    with pytest.raises(FailpointError, match="here"):
        failpoint("here")
    failpoint("here")
    failpoint("elsewhere")


@pytest.mark.parametrize("text", ["here", "here=explode", "here=kill:soon"])
def test_a_misspelt_failpoint_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="here"):
        arm(text)
