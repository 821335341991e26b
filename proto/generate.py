"""Regenerate the stubs beside the .proto files: `python proto/generate.py [OUT_DIR]`. Needs grpcio-tools."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Write titan/v1/worker_pb2.py, .pyi and worker_pb2_grpc.py under `out`, importable as titan.proto.titan.v1."""
    from grpc_tools import protoc

    status = protoc.main(
        ["protoc", f"-I{HERE}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        + [str(p.relative_to(HERE)) for p in sorted(HERE.glob("titan/v1/*.proto"))]
    )
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")
    for stub in out.glob("titan/v1/*_pb2_grpc.py"):
        stub.write_text(stub.read_text().replace("from titan.v1 import", "from titan.proto.titan.v1 import"))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
