from peagle.cli import app

app()
