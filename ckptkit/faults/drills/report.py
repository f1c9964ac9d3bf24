"""The page of a run of drills: one HTML file that needs nothing else."""

import html
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ckptkit.errors import StoreError
from ckptkit.faults.drills.base import CLASSES, DRILLS, MATRIX
from ckptkit.faults.drills.verdict import Verdict

_PAGE = Path(__file__).with_name("report.html")


def write_report(path: str, verdicts: Sequence[Verdict], began: str) -> None:
    """Write the page. Raises StoreError where the file cannot be written.

    Args:
        began: When the drills were started, for people.
    """
    try:
        Path(path).write_text(page(verdicts, began), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the report {path}: {error.strerror}", file=path) from error


def page(verdicts: Sequence[Verdict], began: str) -> str:
    """The page's text. Results are JSON in it, drawn by its own script."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        found[verdict.drill].append(verdict)
    drills = [
        {
            "name": name,
            "kind": DRILLS[name].kind,
            "promise": DRILLS[name].promise,
            "covers": [MATRIX[one] if isinstance(one, int) else one for one in DRILLS[name].covers],
            "rows": [one for one in DRILLS[name].covers if isinstance(one, int)],
            "runs": [verdict.as_dict() for verdict in runs],
        }
        for name, runs in found.items()
    ]
    covered = {one for name in found for one in DRILLS[name].covers}
    facts = {
        "began": began,
        "drills": drills,
        "rows": len([row for row in MATRIX if row in covered]),
        "allRows": len(MATRIX),
        "classes": [one for one in CLASSES if one in covered],
    }
    # "</" would end the script it stands in.
    data = (
        json.dumps(facts, allow_nan=True)
        .replace("NaN", "null")
        .replace("Infinity", "null")
        .replace("</", "<\\/")
    )
    text = _PAGE.read_text(encoding="utf-8")
    return text.replace("__BEGAN__", html.escape(began)).replace("__DATA__", data)
