"""docs/structure.md names every package and only existing paths; packages are small."""

import re
from pathlib import Path

import benchmarks

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "peagle"
BENCHMARKS = ROOT / "benchmarks"
TESTS = ROOT / "tests"
MAP = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
MAX_WORDS = 700
MAX_FILES_PER_PACKAGE = 15
DATA_FOLDERS = {"drafters", "templates", "template", "page", "c"}


def packages_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("__init__.py"))


def packages() -> list[Path]:
    return [package.relative_to(PACKAGE) for package in packages_in(PACKAGE)]


def named_paths() -> list[str]:
    return re.findall(r"`([\w./]+(?:/|\.py|\.toml))`", MAP)


def test_every_named_path_exists() -> None:
    folders = [PACKAGE, ROOT, *(PACKAGE / package for package in packages())]
    for name in named_paths():
        assert any((folder / name).exists() for folder in folders), (
            f"docs/structure.md names {name}"
        )


def test_every_package_is_named() -> None:
    names = {name.rstrip("/") for name in named_paths()}
    for package in packages():
        if package != Path("."):
            spelled = {str(package), package.name}
            assert spelled & names, f"docs/structure.md does not name {package}"


def test_the_map_is_short() -> None:
    assert len(MAP.split()) <= MAX_WORDS


def test_packages_are_small() -> None:
    for package in [*packages_in(PACKAGE), *packages_in(BENCHMARKS), *packages_in(TESTS)]:
        files = [path for path in package.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MAX_FILES_PER_PACKAGE, f"{package} has {len(files)} files"


def test_every_package_of_benchmarks_is_listed() -> None:
    listed = re.findall(r"^    (\w+)  ", benchmarks.__doc__ or "", re.MULTILINE)
    assert listed == [package.name for package in packages_in(BENCHMARKS) if package != BENCHMARKS]
