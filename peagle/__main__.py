"""`python -m peagle`, as torchrun wants it."""

from peagle.cli import app

app()
