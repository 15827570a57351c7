"""Uploads of weights to a fake S3."""

from pathlib import Path
from typing import Any

import pytest

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.delete import delete_prefix
from peagle.deploy.sagemaker.operate.upload import upload_files
from peagle.deploy.sagemaker.plan.artifact import Artifact, hash_folder
from peagle.deploy.sagemaker.resources.stack import Upload
from peagle.errors import UserError
from tests.support.aws import REGION, aws, weights

__all__ = ["aws", "weights"]
PREFIX = "s3://weights/peagle/tiny/"


@pytest.fixture
def s3(aws: Clients) -> Any:
    aws["s3"].create_bucket(
        Bucket="weights", CreateBucketConfiguration={"LocationConstraint": REGION}
    )
    return aws["s3"]


def keys(s3: Any) -> dict[str, int]:
    return {
        entry["Key"]: entry["Size"]
        for entry in s3.list_objects_v2(Bucket="weights").get("Contents", [])
    }


def test_sent_once(s3: Any, weights: tuple[Artifact, Artifact]) -> None:
    target = Upload("target", weights[0], PREFIX)
    reported: list[tuple[str, int, int]] = []
    assert (
        upload_files(s3, target, lambda what, done, total: reported.append((what, done, total)))
        == 2
    )
    assert keys(s3) == {"peagle/tiny/config.json": 2, "peagle/tiny/sub/model.safetensors": 1000}
    assert ("model.safetensors: sending", 1000, 1000) in reported
    assert upload_files(s3, target) == 0


def test_same_size_but_other_bytes_are_sent_again(
    s3: Any, weights: tuple[Artifact, Artifact]
) -> None:
    target = Upload("target", weights[0], PREFIX)
    upload_files(s3, target)
    assert weights[0].folder is not None
    (weights[0].folder / "config.json").write_bytes(b"[]")
    assert upload_files(s3, target) == 1
    assert s3.get_object(Bucket="weights", Key="peagle/tiny/config.json")["Body"].read() == b"[]"
    s3.put_object(
        Bucket="weights", Key="peagle/tiny/config.json", Body=b"[]"
    )  # from another tool, without a digest
    assert upload_files(s3, target) == 1


def test_stopped_half_way_it_goes_on(
    s3: Any, weights: tuple[Artifact, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Upload("target", weights[0], PREFIX)
    real = s3.upload_file
    tried: list[str] = []

    def stopped(path: str, *args: Any, **kwargs: Any) -> None:
        tried.append(Path(path).name)
        if len(tried) == 2:
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    monkeypatch.setattr(s3, "upload_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        upload_files(s3, target)
    assert len(keys(s3)) == 1
    assert upload_files(s3, target) == 1
    assert tried == ["config.json", "model.safetensors", "model.safetensors"]


def test_large_files_go_in_parts(s3: Any, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(20 << 20))
    large = Upload("target", Artifact("t", hash_folder(folder), folder), PREFIX)
    assert upload_files(s3, large) == 1
    head = s3.head_object(Bucket="weights", Key="peagle/tiny/model.safetensors")
    assert head["ContentLength"] == 20 << 20 and "-" in head["ETag"], "an ETag of parts"
    assert upload_files(s3, large) == 0


def test_no_bucket(aws: Clients, weights: tuple[Artifact, Artifact]) -> None:
    with pytest.raises(UserError, match="aws s3 mb s3://nowhere"):
        upload_files(aws["s3"], Upload("target", weights[0], "s3://nowhere/x/"))


def test_emptied(s3: Any, weights: tuple[Artifact, Artifact]) -> None:
    for name in ("a", "b"):
        upload_files(s3, Upload("target", weights[0], f"s3://weights/{name}/"))
    assert delete_prefix(s3, "s3://weights/a/") == 2
    assert all(key.startswith("b/") for key in keys(s3)) and len(keys(s3)) == 2


def test_receipts_and_hidden_files_are_not_sent(tmp_path: Path) -> None:
    for name in ("config.json", "peagle.json", ".cache/x", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [path.name for path in Artifact("t", "x", tmp_path).files()] == ["config.json"]
