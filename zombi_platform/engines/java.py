"""Which Java there is, as Spark's own scripts would find it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from zombi_platform.errors import StartupError

JAVA_MIN: Final = 17
VERSION: Final = re.compile(r'version "(\d+)')
ANSWER_SECS_MAX: Final = 30


def find_java(environ: Mapping[str, str]) -> str | None:
    """The `java` of JAVA_HOME if that is set, else of the PATH."""
    home = environ.get("JAVA_HOME")
    return shutil.which(f"{home}/bin/java" if home else "java", path=environ.get("PATH"))


def check_java(environ: Mapping[str, str]) -> None:
    """Raise unless Spark can run."""
    java = find_java(environ)
    need = f"Spark needs Java {JAVA_MIN} or newer; install it, or use ZOMBI_ENGINE=arrow"
    if java is None:
        home = environ.get("JAVA_HOME")
        raise StartupError(f"no java in {'JAVA_HOME=' + home if home else 'the PATH'}: {need}")
    done = subprocess.run(
        [java, "-version"], capture_output=True, text=True, timeout=ANSWER_SECS_MAX
    )
    found = VERSION.search(done.stderr)
    if found is None or int(found[1]) < JAVA_MIN:
        shown = done.stderr.strip().splitlines()[:1]
        raise StartupError(f"{java} says {shown}: {need}")
