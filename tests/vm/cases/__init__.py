"""The cases, by topic; importing this package registers every one of them."""

import importlib
from pathlib import Path

from cases.registry import CASES, Case, case

__all__ = ["CASES", "Case", "case"]

for _file in sorted(Path(__file__).parent.glob("cases_*.py")):
    importlib.import_module(f"cases.{_file.stem}")
