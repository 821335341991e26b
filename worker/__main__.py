"""`python -m titan.worker` is `titan-worker`."""

from titan.worker.main import main

main()
