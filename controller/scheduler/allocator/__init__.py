"""Allocators that map ordered jobs to nodes and GPUs."""
