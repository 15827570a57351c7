"""benchmarks/server/bytecode.py: packages are compiled before the start of a server is measured."""

from pathlib import Path

import pytest

from benchmarks.server import bytecode


def test_installed_packages_and_the_standard_library_are_compiled() -> None:
    sources = bytecode.installed_sources()
    names = {source.name for source in sources}
    assert {"torch", "transformers", "peagle", "fastapi", "typing_extensions.py"} <= names
    assert {"json", "subprocess.py"} <= names
    assert not {"test", "site-packages"} & names
    assert all(source.exists() for source in sources)


def test_compiled_bytecode_is_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "module.py"
    source.write_text("x = 1")
    cache = tmp_path / "bytecode"
    monkeypatch.setattr(bytecode, "bytecode_cache", lambda: cache)
    monkeypatch.setattr(bytecode, "installed_sources", lambda: [source])
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    bytecode.compile_bytecode()
    assert len(list(cache.rglob("module.*.pyc"))) == 1
