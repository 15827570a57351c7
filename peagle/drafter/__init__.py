"""The drafter: its configuration, the one block it is made of, and the formats it is stored in."""

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter

__all__ = ["Drafter", "DrafterConfig"]
