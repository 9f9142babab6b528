"""The wire format: protobuf stubs, the dataclasses that travel, and the codec between them."""
