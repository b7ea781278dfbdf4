"""Task pools: manifests, folder checks, and the pools that ship inside the package."""

from rl360.tasks.manifest import content_hash, load_tasks, manifest_path, validate_layout

__all__ = ["content_hash", "load_tasks", "manifest_path", "validate_layout"]
