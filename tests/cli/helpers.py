"""What the tests of the command line share: running it in this process, and looking at folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
from click.testing import CliRunner, Result

from ckptkit.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "cli" / "schema.json").read_text())

TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 384,
    "tie_word_embeddings": False,
}


def invoke(*arguments: object) -> Result:
    """Run `ckptkit` with these arguments in this process."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def invoke_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run it with --json: exit code and the object, which the published schema accepts."""
    done = invoke(*arguments, "--json")
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.output
    found = json.loads(lines[0])
    one = found.get("report", "Error")  # its own definition first: the message of a mismatch is clearer
    jsonschema.validate(found, {"$ref": f"#/$defs/{one}", "$defs": SCHEMA["$defs"]})
    jsonschema.validate(found, SCHEMA)
    return done.exit_code, found


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder with the digest of its bytes; links as their target."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def settings(values: dict[str, Any]) -> list[str]:
    """`--set` options for a configuration."""
    return [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]
