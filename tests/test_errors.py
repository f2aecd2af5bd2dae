"""What errors tell people to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import thinwire.errors
from thinwire.errors import how_to_install


def test_what_is_missing_is_installed_from_where_thinwire_is(tmp_path: Path) -> None:
    assert how_to_install("report") == "pip install -e '.[report]'", "in a clone, as here"
    for path in ("site-packages/thinwire", "src/thinwire"):  # the second is no clone: there is no pyproject.toml beside it
        (tmp_path / path).mkdir(parents=True)
        shutil.copy(thinwire.errors.__file__, tmp_path / path / "errors.py")
        code = "from errors import how_to_install; print(how_to_install('images'))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / path, capture_output=True, text=True, check=True)
        assert done.stdout == "pip install 'thinwire[images]'\n"
