"""gRPC server, client and the conversion between protobuf and sluice types."""
