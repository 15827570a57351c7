"""Pull: fetch the targets and drafters of a pair into folders of this machine."""

from peagle.pull.pull import pull, pull_drafter, source_order, target_folder
from peagle.pull.receipt import RECEIPT, Receipt, has_stored, receipt

__all__ = [
    "RECEIPT",
    "Receipt",
    "has_stored",
    "pull",
    "pull_drafter",
    "receipt",
    "source_order",
    "target_folder",
]
