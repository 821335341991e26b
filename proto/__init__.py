"""The wire contract: titan/v1/*.proto and the stubs generated from it."""
