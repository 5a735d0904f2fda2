"""Protobuf and gRPC stubs of the contract between pods, generated from proto/ at build."""
