"""`titan-worker` and `python -m titan.worker`. Sets what must be set before gRPC is imported."""

from titan.common.security.tls import prepare_grpc


def main() -> None:
    """Run the command; does not return."""
    prepare_grpc()
    from titan.worker.main import main as run

    run()


if __name__ == "__main__":
    main()
