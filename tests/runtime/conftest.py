"""transformers is imported by what this room runs."""

from core.torchvision_ops import declare

declare()
