"""What ssfl relies on in Flower beyond its public interface: one file, and this list.

If this test fails after a change, say why the change needs more of Flower's internals; if it fails with a new
release of Flower, `deploy/internals.py` is the one file to look at.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ssfl

SOURCE = Path(ssfl.__file__).parent
PUBLIC = ("flwr", "flwr.app", "flwr.clientapp", "flwr.clientapp.typing", "flwr.serverapp")
RELIED_ON = {
    "flwr.app.message": {"remove_content_from_message"},
    "flwr.cli.build": {"build_fab_from_files"},
    "flwr.common.constant": {
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", "SYSTEM_TIME_TOLERANCE", "TIMESTAMP_HEADER",
        "TIMESTAMP_TOLERANCE", "ErrorCode",
    },
    "flwr.common.serde": {"message_to_proto"},
    "flwr.proto": {
        "control_pb2", "fab_pb2", "fleet_pb2", "heartbeat_pb2", "message_pb2", "node_pb2", "runtime_pb2",
    },
    "flwr.supercore.constant": {
        "FLEET_HTTP_PUBLIC_KEY_HEADER", "FLEET_HTTP_SIGNATURE_HEADER", "FLWR_IN_MEMORY_DB_NAME",
        "TASK_TOKEN_HEADER", "TaskType",
    },
    "flwr.supercore.date": {"now"},
    "flwr.supercore.inflatable.inflatable_object": {
        "get_all_nested_objects", "get_object_body", "get_object_head_values_from_object_content",
        "get_object_id", "get_object_tree", "iterate_object_tree",
    },
    "flwr.supercore.inflatable.inflatable_utils": {"inflate_object_from_contents"},
    "flwr.supercore.primitives.asymmetric": {
        "bytes_to_public_key", "public_key_to_bytes", "sign_message", "verify_signature",
    },
    "flwr.supercore.task_identity": {"TaskIdentity"},
    "flwr.superlink.main": {"create_app"},
    "flwr.superlink.servicer.fleet": {"fleet_handlers"},
    "flwr.superlink.servicer.runtime": {"runtime_handlers"},
}  # fmt: skip


def imports(file: Path) -> dict[str, set[str]]:
    """What a file imports of Flower, by module."""
    found: dict[str, set[str]] = {}
    for part in ast.walk(ast.parse(file.read_text())):
        if isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "flwr":
            found.setdefault(str(part.module), set()).update(name.name for name in part.names)
        elif isinstance(part, ast.Import):
            for name in part.names:
                if name.name.split(".")[0] == "flwr":
                    found.setdefault(name.name, set())
    return found


def test_one_file_uses_flowers_internals_and_these_alone() -> None:
    for file in SOURCE.rglob("*.py"):
        inner = {module: names for module, names in imports(file).items() if module not in PUBLIC}
        expected = RELIED_ON if file.name == "internals.py" and file.parent.name == "deploy" else {}
        assert inner == expected, file


def test_another_flower_is_told_in_one_line() -> None:
    script = """
import flwr.app  # keeps what it imports
import flwr.supercore.task_identity as changed
del changed.TaskIdentity
from ssfl.errors import SsflError
try:
    import ssfl.deploy.internals
except SsflError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    one_line("TaskIdentity", told)


@pytest.mark.parametrize(
    ("module", "name"),
    [("flwr.superlink.servicer.fleet.fleet_handlers", "push_object"), ("flwr.superlink.main", "create_app")],
)
def test_another_superlink_is_told_in_one_line(module: str, name: str, tmp_path: Path) -> None:
    """Also what the process with the port only looks for when it starts."""
    script = f"""
import os, sys
os.environ["FLWR_HOME"] = sys.argv[1]
import {module} as changed
del changed.{name}
from ssfl.deploy import internals
from ssfl.errors import SsflError
try:
    internals.superlink(True)
except SsflError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    one_line(name, told.stdout)


def one_line(name: str, told: str) -> None:
    """What is missing is told in one line, with what to do."""
    assert name in told
    assert "pip install 'ssfl[flower]'" in told
    assert told.count("\n") == 1
