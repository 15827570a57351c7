"""Fixtures of the training tests."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture
def no_curves() -> Iterator[None]:
    """Skip drawing the training curves, which takes a second."""
    with patch("peagle.train.journal.draw_curves"):
        yield
