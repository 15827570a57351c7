"""Uploads of weights to a fake S3."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.delete import delete_prefix
from peagle.deploy.sagemaker.operate.upload import upload_files
from peagle.deploy.sagemaker.plan.artifact import Artifact, hash_folder
from peagle.deploy.sagemaker.resources.stack import Upload
from peagle.errors import UserError
from tests.support.deploy.aws import ACCOUNT, REGION, aws, weights

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


def test_a_folder_is_uploaded_once(s3: Any, weights: tuple[Artifact, Artifact]) -> None:
    target = Upload("target", weights[0], PREFIX)
    reported: list[tuple[str, int, int]] = []
    sent = upload_files(s3, target, ACCOUNT, lambda *report: reported.append(report))
    assert sent == 2
    assert keys(s3) == {"peagle/tiny/config.json": 2, "peagle/tiny/sub/model.safetensors": 1000}
    assert ("model.safetensors: sending", 1000, 1000) in reported
    assert upload_files(s3, target, ACCOUNT) == 0


def test_a_changed_file_of_the_same_size_is_uploaded_again(
    s3: Any, weights: tuple[Artifact, Artifact]
) -> None:
    target = Upload("target", weights[0], PREFIX)
    upload_files(s3, target, ACCOUNT)
    assert weights[0].folder is not None
    (weights[0].folder / "config.json").write_bytes(b"[]")
    assert upload_files(s3, target, ACCOUNT) == 1
    assert s3.get_object(Bucket="weights", Key="peagle/tiny/config.json")["Body"].read() == b"[]"
    # written by another tool, without a digest
    s3.put_object(Bucket="weights", Key="peagle/tiny/config.json", Body=b"[]")
    assert upload_files(s3, target, ACCOUNT) == 1


def test_an_interrupted_upload_resumes(
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
        upload_files(s3, target, ACCOUNT)
    assert len(keys(s3)) == 1
    assert upload_files(s3, target, ACCOUNT) == 1
    assert tried == ["config.json", "model.safetensors", "model.safetensors"]


def test_large_files_use_multipart_uploads(s3: Any, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(20 << 20))
    large = Upload("target", Artifact("t", hash_folder(folder), folder), PREFIX)
    assert upload_files(s3, large, ACCOUNT) == 1
    head = s3.head_object(Bucket="weights", Key="peagle/tiny/model.safetensors")
    assert head["ContentLength"] == 20 << 20 and "-" in head["ETag"], (
        "the ETag of a multipart upload"
    )
    assert upload_files(s3, large, ACCOUNT) == 0


def test_a_missing_bucket_is_an_error(aws: Clients, weights: tuple[Artifact, Artifact]) -> None:
    with pytest.raises(UserError, match="aws s3 mb s3://nowhere"):
        upload_files(aws["s3"], Upload("target", weights[0], "s3://nowhere/x/"), ACCOUNT)


def test_a_bucket_of_another_account_is_refused(
    s3: Any, weights: tuple[Artifact, Artifact]
) -> None:
    """An attacker who owns a bucket of this name neither receives nor provides weights."""

    def check_owner(params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]] | None:
        """Check the bucket owner like S3; moto does not implement this."""
        expected = params["headers"].get("x-amz-expected-bucket-owner", ACCOUNT)
        if expected == ACCOUNT:
            return None
        return SimpleNamespace(status_code=403), {"Error": {"Code": "403", "Message": "Forbidden"}}

    s3.meta.events.register("before-call.s3", check_owner)
    with pytest.raises(UserError, match=r"weights does not belong to account 999.*`bucket_owner`"):
        upload_files(s3, Upload("target", weights[0], PREFIX), "999999999999")
    assert keys(s3) == {}
    assert upload_files(s3, Upload("target", weights[0], PREFIX), ACCOUNT) == 2


def test_every_call_names_the_owner(s3: Any, weights: tuple[Artifact, Artifact]) -> None:
    """The owner of the bucket may change during the upload."""
    sent: list[tuple[str, str | None]] = []

    def record(params: dict[str, Any], model: Any, **_: Any) -> None:
        sent.append((model.name, params["headers"].get("x-amz-expected-bucket-owner")))

    s3.meta.events.register("before-call.s3", record)
    upload_files(s3, Upload("target", weights[0], PREFIX), ACCOUNT)
    assert {operation for operation, _ in sent} == {"HeadBucket", "HeadObject", "PutObject"}
    assert {owner for _, owner in sent} == {ACCOUNT}


def test_the_account_of_the_credentials(aws: Clients) -> None:
    assert aws.account == ACCOUNT


def test_a_prefix_is_deleted(s3: Any, weights: tuple[Artifact, Artifact]) -> None:
    for name in ("a", "b"):
        upload_files(s3, Upload("target", weights[0], f"s3://weights/{name}/"), ACCOUNT)
    assert delete_prefix(s3, "s3://weights/a/") == 2
    assert all(key.startswith("b/") for key in keys(s3)) and len(keys(s3)) == 2


def test_receipts_and_hidden_files_are_not_sent(tmp_path: Path) -> None:
    for name in ("config.json", "peagle.json", ".cache/x", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [path.name for path in Artifact("t", "x", tmp_path).files()] == ["config.json"]
