"""`titan-coordinator` and `python -m titan.coordinator`. Sets what must be set before gRPC is imported."""

from titan.common.security.tls import prepare_grpc


def main() -> None:
    """Run the command; does not return."""
    prepare_grpc()
    from titan.coordinator.main import main as run

    run()


if __name__ == "__main__":
    main()
