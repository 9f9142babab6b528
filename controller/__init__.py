"""The controller: queue, scheduler, store and the gRPC services."""
