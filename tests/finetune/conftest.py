"""transformers is imported by the modules of this room."""

from core.torchvision_ops import declare

declare()
